"""Copy blocks within caches, and between caches of a device and pinned memory of its host: all of them by one kernel.

A program copies a piece of one block of one cache. Addresses of caches come in a tensor, because there are as many as
layers. Pinned memory is read and written by the device where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels import reference
from quire.worker.kernels.reference.copy_blocks import independent_runs
from quire.worker.kernels.triton.example_inputs import floats, on_host
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.staging import send

_PIECE = 4096


@triton.jit
def _move(
    pairs, addresses, words: tl.constexpr, word_bits: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`addresses` has for each cache that of its source and of its destination, then the bytes of a step in each."""
    pair = tl.program_id(0)
    cache = tl.program_id(1)
    word = tl.program_id(2) * block + tl.arange(0, block)
    source_block = tl.load(pairs + 2 * pair)
    there = tl.load(pairs + 2 * pair + 1)
    row = addresses + 4 * cache
    source = tl.load(row) + source_block * tl.load(row + 2)
    destination = tl.load(row + 1) + there * tl.load(row + 3)
    if word_bits == 64:
        source = source.to(tl.pointer_type(tl.int64))
        destination = destination.to(tl.pointer_type(tl.int64))
    elif word_bits == 32:
        source = source.to(tl.pointer_type(tl.int32))
        destination = destination.to(tl.pointer_type(tl.int32))
    else:
        source = source.to(tl.pointer_type(tl.int8))
        destination = destination.to(tl.pointer_type(tl.int8))
    tl.store(destination + word, tl.load(source + word, word < words), word < words)


def copy_blocks(caches: Sequence[Tensor], pairs_N2: Tensor) -> None:
    for sources, destinations in independent_runs(pairs_N2.tolist()):
        _move_all(caches, caches, torch.tensor([sources, destinations]).T.contiguous())


def move_blocks(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs_N2: Tensor) -> None:
    if all(_is_reachable(tensor) for tensor in (*sources, *destinations)):
        _move_all(sources, destinations, pairs_N2)
    else:
        reference.move_blocks(sources, destinations, pairs_N2)


def _is_reachable(cache: Tensor) -> bool:
    """By a device, or by the interpreter, which is given no device at all."""
    return not cache.is_cpu or cache.is_pinned() or not torch.cuda.is_available()


def _move_all(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs_N2: Tensor) -> None:
    """For caches whose blocks are alike one launch, and one for each other kind."""
    kinds: dict[tuple[int, int], list[list[int]]] = {}
    device = next((cache.device for cache in (*sources, *destinations) if not cache.is_cpu), torch.device("cpu"))
    for source, destination in zip(sources, destinations, strict=True):
        num_bytes = source[0].numel() * source.element_size()
        strides = [cache.stride(0) * cache.element_size() for cache in (source, destination)]
        row = [source.data_ptr(), destination.data_ptr(), *strides]
        # all of them are multiples of a word
        word_bytes = next(size for size in (8, 4, 1) if math.gcd(num_bytes, *row) % size == 0)
        kinds.setdefault((num_bytes, word_bytes), []).append(row)
    if len(pairs_N2) == 0:
        return
    pairs = send(pairs_N2.to(torch.int64), device)
    for (num_bytes, word_bytes), rows in kinds.items():
        words = num_bytes // word_bytes
        launch(
            _move,
            (len(pairs_N2), len(rows), -(-words // _PIECE)),
            pairs,
            send(torch.tensor(rows, dtype=torch.int64), device),
            words=words,
            word_bits=8 * word_bytes,
            block=_PIECE,
        )


def _example() -> object:
    caches = [floats(100, 8, 16, 128) for _ in range(64)]
    pairs = on_host(number for block in range(16) for number in (block, 50 + block))
    move_blocks(caches, caches, pairs.view(16, 2))
    return caches


EXAMPLES = (Example("sixteen blocks of 8B", _example, 2 * 16 * 64 * 8 * 16 * 128 * 2),)
