"""Block tables that live on the device (4.6.2): changes are written into them by one kernel, and another makes what the
attention of a step needs of them: its rows, and the slot of each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import given
from quire.worker.kernels.triton.launch import Example, launch

_BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _apply_changes(tables, changes, count, block: tl.constexpr):
    entry = tl.program_id(0) * block + tl.arange(0, block)
    is_entry = entry < count
    place = tl.load(changes + entry, is_entry, 0)
    block_id = tl.load(changes + count + entry, is_entry, 0)
    tl.store(tables + place, block_id.to(tl.int32), is_entry)


@triton.jit(do_not_specialize=["longest", "num_tokens"])
def _prepare_blocks(
    tables, rows, computed, is_written, query_starts, block_tables, slots,
    num_rows, width, longest, num_tokens, block_size,
    block: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    sequence = tl.program_id(1)
    own = tables + (group * num_rows + tl.load(rows + sequence)).to(tl.int64) * width
    target = block_tables + (group * tl.num_programs(1) + sequence).to(tl.int64) * longest
    for start in range(0, longest, block):
        index = start + tl.arange(0, block)
        tl.store(target + index, tl.load(own + index, index < longest, 0), index < longest)
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    position = tl.load(computed + sequence)
    is_first_written = tl.load(is_written + sequence) != 0
    for start in range(0, count, block):
        number = start + tl.arange(0, block)
        is_token = number < count
        place = position + number
        block_id = tl.load(own + place // block_size, is_token, 0).to(tl.int64)
        slot = block_id * block_size + place % block_size
        slot = tl.where((number == 0) & is_first_written, -1, slot)
        tl.store(slots + group.to(tl.int64) * num_tokens + first + number, slot, is_token)


def apply_changes(tables_GRM: Tensor, changes_2n: Tensor) -> None:
    """Entries of all tables, by their number among all, get new block ids. What is named twice gets one id."""
    count = changes_2n.shape[1]
    launch(_apply_changes, (triton.cdiv(count, _BLOCK),), tables_GRM, changes_2n, count, block=_BLOCK)


def prepare_blocks(
    tables_GRM: Tensor,
    num_groups: int,
    rows_S: Tensor,
    computed_S: Tensor,
    is_written_S: Tensor,
    query_starts_S1: Tensor,
    num_tokens: int,
    longest: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """(block tables [G, S, longest], slots [G, T]) of the first groups. A first token that is written already gets the
    slot -1."""
    _, num_rows, width = tables_GRM.shape
    device = tables_GRM.device
    block_tables = torch.empty((num_groups, len(rows_S), longest), dtype=torch.int32, device=device)
    slots = torch.empty((num_groups, num_tokens), dtype=torch.int64, device=device)
    launch(
        _prepare_blocks,
        (num_groups, len(rows_S)),
        tables_GRM,
        rows_S,
        computed_S,
        is_written_S,
        query_starts_S1,
        block_tables,
        slots,
        num_rows,
        width,
        longest,
        num_tokens,
        block_size,
        block=_BLOCK,
    )
    return block_tables, slots


def _example() -> None:
    """256 rows of 8B, one token each, 4,000 tokens long."""
    tables = given([0] * (256 * 8192), torch.int32).view(1, 256, 8192)
    apply_changes(tables, given(range(32)).view(2, 16))
    starts = given(range(257), torch.int32)
    prepare_blocks(tables, 1, given(range(256)), given([3999] * 256), given([0] * 256), starts, 256, 250, 16)


EXAMPLES = (Example("256 rows of 8B", _example),)
