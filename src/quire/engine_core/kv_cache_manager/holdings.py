"""Who holds which blocks, as columns: for what is counted or shown of many sequences at once.

With a thousand sequences a loop over their tables would hold up the engine for longer than a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.engine_core.block_table import NO_BLOCK, BlockTable
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import NO_INTS, IntArray, int_array


class Holder(Protocol):
    """A sequence, living or kept."""

    block_tables: list[BlockTable]

    @property
    def num_computed_tokens(self) -> int: ...


@dataclass(frozen=True)
class Holdings:
    """Entry i: the holder of this number has this block, with so many slots filled. Passed blocks are left out."""

    holder: IntArray
    block: IntArray
    num_filled: IntArray


def holdings_of(holders: Sequence[Holder], groups: Sequence[KVGroup], block_size: int) -> Holdings:
    """Every entry of every block table."""
    tables = [(number, table.blocks) for number, holder in enumerate(holders) for table in holder.block_tables]
    if not tables:
        return Holdings(NO_INTS, NO_INTS, NO_INTS)
    lengths = int_array([len(blocks) for _, blocks in tables])
    holder = np.repeat(int_array([number for number, _ in tables]), lengths)
    block = np.concatenate([blocks for _, blocks in tables])
    index = np.arange(len(block)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    computed = int_array([one.num_computed_tokens for one in holders])
    num_filled = np.clip(computed[holder] - index * block_size, 0, block_size)
    if groups[-1].num_state_blocks:
        # a state has no slots that are still empty
        is_state = int_array([number % len(groups) == len(groups) - 1 for number in range(len(tables))])
        num_filled[np.repeat(is_state, lengths) > 0] = block_size
    is_there = block != NO_BLOCK
    return Holdings(holder[is_there], block[is_there], num_filled[is_there])
