"""Recurrent states where they lie in the blocks of the cache: see `kernels/sequence_states.py`.

Before a recurrence runs, one small kernel finds where the chunks of each sequence lie and how far its state is; the
recurrences then read and write floats at `place_of`. A chunk never cuts a float in two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.state_layout import STATE_HEADER_BYTES
from quire.worker.kernels.triton.launch import launch
from quire.worker.kernels.triton.rows import block_of

_STRANGE_STATE = "a recurrent state stands at another token than its sequence: this is a mistake of Quire's"
_ADDRESSES = "quire_places"
HEADER = tl.constexpr(STATE_HEADER_BYTES)


@triton.jit(do_not_specialize=["starts", "num_kept"])
def _find_chunks(
    addresses, tables, starts, num_kept, chunks, num_read,
    table_stride, num_places, first_chunk, num_chunks, chunk_bytes,
    block: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    number = tl.arange(0, block)
    is_chunk = number < num_chunks
    entry = (first_chunk + number) // num_places
    place = (first_chunk + number) % num_places
    row = tl.load(tables + sequence * table_stride + entry, is_chunk, 0).to(tl.int64)
    address = tl.load(addresses + place, is_chunk, 0) + row * chunk_bytes
    tl.store(chunks + sequence * num_chunks + number, address, is_chunk)
    start = tl.load(starts + sequence).to(tl.int64)
    header = tl.sum(tl.where(number == 0, address, 0)).to(tl.pointer_type(tl.int64))
    # a sequence that begins has no state, whatever the blocks hold
    absorbed = tl.load(header)
    tl.store(num_read + sequence, tl.where(start == 0, 0, absorbed - start).to(tl.int32))
    tl.store(header, start + tl.load(num_kept + sequence).to(tl.int64))


@triton.jit
def place_of(chunks, sequence, index, num_chunks, chunk_bytes):
    """Where a float of a state lies."""
    byte = HEADER + index * 4
    chunk = tl.load(chunks + sequence * num_chunks + byte // chunk_bytes)
    return (chunk + byte % chunk_bytes).to(tl.pointer_type(tl.float32))


class StateMemory(NamedTuple):
    """Addresses of the chunks of each sequence, and 1 where its state has absorbed the first token already."""

    chunks: Tensor
    num_read_S: Tensor
    num_chunks: int
    chunk_bytes: int


def states_of(
    places: list[Tensor],
    first_chunk: int,
    tables_Sn: Tensor,
    starts_S: Tensor,
    num_kept_S: Tensor,
    num_bytes: int,
) -> StateMemory:
    """Of a layer whose states have so many bytes, header included. Headers say from now on what the step makes true."""
    count = len(tables_Sn)
    chunk_bytes = places[0].shape[1]
    num_chunks = triton.cdiv(num_bytes, chunk_bytes)
    device = tables_Sn.device
    chunks = torch.empty((count, num_chunks), dtype=torch.int64, device=device)
    num_read = torch.empty(count, dtype=torch.int32, device=device)
    launch(
        _find_chunks,
        (count,),
        _addresses_of(places),
        tables_Sn,
        starts_S,
        num_kept_S,
        chunks,
        num_read,
        tables_Sn.stride(0),
        len(places),
        first_chunk,
        num_chunks,
        chunk_bytes,
        block=block_of(num_chunks),
    )
    if not num_read.is_meta:
        torch._assert_async(((num_read == 0) | (num_read == 1)).all(), _STRANGE_STATE)
    return StateMemory(chunks, num_read, num_chunks, chunk_bytes)


def _addresses_of(places: list[Tensor]) -> Tensor:
    """Where the places begin. The first of them remembers, because a copy waits for the device."""
    addresses = [place.data_ptr() for place in places]
    known: tuple[list[int], Tensor] | None = getattr(places[0], _ADDRESSES, None)
    if known is None or known[0] != addresses:
        known = (addresses, torch.tensor(addresses, dtype=torch.int64, device=places[0].device))
        setattr(places[0], _ADDRESSES, known)
    return known[1]
