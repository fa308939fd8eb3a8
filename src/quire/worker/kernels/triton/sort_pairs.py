"""Which rows meet which weight: pairs of a row and a number, brought into the order of their numbers.

Pairs of one number stay in their order, so nothing depends on who is faster. Numbers outside of a range are one more
bin, behind the last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.launch import launch
from quire.worker.kernels.triton.rows import block_of

_BLOCK = 1024


@triton.jit
def _bin_of(ids, place, count, first, num_bins):
    """The bin of pairs; of places behind the last, none."""
    number = tl.load(ids + place, place < count, 0) - first
    number = tl.where((number >= 0) & (number < num_bins), number, num_bins)
    return tl.where(place < count, number, -1)


@triton.jit(do_not_specialize=["count"])
def _count_pairs(ids, counts, count, first, num_bins, is_added: tl.constexpr, block: tl.constexpr):
    own = tl.program_id(0)
    total = tl.zeros([block], tl.int32)
    for start in range(0, count, block):
        number = _bin_of(ids, start + tl.arange(0, block), count, first, num_bins)
        total += (number == own).to(tl.int32)
    mine = tl.sum(total).to(counts.dtype.element_ty)
    if is_added:
        mine += tl.load(counts + own)
    tl.store(counts + own, mine)


@triton.jit(do_not_specialize=["count"])
def _place_pairs(
    ids, counts, starts, order, count, first, num_bins, bins_block: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    own = tl.program_id(0)
    bins = tl.arange(0, bins_block)
    place = tl.sum(tl.load(counts + bins, bins < own, 0))
    tl.store(starts + own, place)
    if own == num_bins:
        tl.store(starts + own + 1, count)
    for start in range(0, count, block):
        pair = start + tl.arange(0, block)
        is_own = _bin_of(ids, pair, count, first, num_bins) == own
        rank = tl.cumsum(is_own.to(tl.int32))
        tl.store(order + place + rank - 1, pair, is_own)
        place += tl.max(rank)


class SortedPairs(NamedTuple):
    """Pairs order[starts[b]] ... order[starts[b + 1] - 1] belong to bin b; the last bin is nobody's."""

    order: Tensor
    starts: Tensor
    num_bins: int


def sort_pairs(ids: Tensor, first: int, num_bins: int) -> SortedPairs:
    """The pairs of numbers first ... first + num_bins - 1, then the others. `ids`: int32, in one piece."""
    count = ids.numel()
    counts = torch.empty(num_bins + 1, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_bins + 2, dtype=torch.int32, device=ids.device)
    order = torch.empty(count, dtype=torch.int32, device=ids.device)
    block = min(_BLOCK, block_of(max(count, 16)))
    launch(_count_pairs, (num_bins + 1,), ids, counts, count, first, num_bins, is_added=False, block=block)
    launch(
        _place_pairs,
        (num_bins + 1,),
        ids,
        counts,
        starts,
        order,
        count,
        first,
        num_bins,
        bins_block=block_of(num_bins + 1),
        block=block,
    )
    return SortedPairs(order, starts, num_bins)


def add_counts(ids: Tensor, counts: Tensor) -> None:
    """counts[number] += how often it occurs."""
    block = min(_BLOCK, block_of(max(ids.numel(), 16)))
    launch(_count_pairs, (len(counts),), ids, counts, ids.numel(), 0, len(counts), is_added=True, block=block)


@triton.jit
def tile_of_bin(starts, tile, num_bins, bins_block: tl.constexpr, block_t: tl.constexpr):
    """(bin, its first pair in the order, how many from there on are its) of a tile; bins are cut into tiles of their
    own, one after the other. Behind the last tile the number of pairs is 0 or less."""
    bins = tl.arange(0, bins_block)
    is_bin = bins <= num_bins
    start = tl.load(starts + bins, is_bin, 0)
    end = tl.load(starts + bins + 1, is_bin, 0)
    num_tiles = (end - start + block_t - 1) // block_t
    behind = tl.cumsum(num_tiles)
    own = tl.sum((is_bin & (behind <= tile)).to(tl.int32))
    is_own = bins == own
    within = tile - tl.sum(tl.where(is_own, behind - num_tiles, 0))
    first = tl.sum(tl.where(is_own, start, 0)) + within * block_t
    return own, first, tl.sum(tl.where(is_own, end, 0)) - first


def most_tiles(count: int, num_bins: int, block_t: int) -> int:
    """How many tiles there may be, however pairs are spread."""
    return min(count, count // block_t + num_bins + 1)
