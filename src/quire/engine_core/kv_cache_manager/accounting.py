"""Where every slot of the KV cache is: what metrics, pages and the evaluation of chapter 3 read (3.1, figure 3.2).

    token states   filled, held by one sequence            cached   content known, held by nobody
    shared         filled, held by several; counted once    kept     filled, held by kept sequences alone
    reserved       the unfilled rest of a held block        pinned   filled, part of a pinned prefix
    free           neither held nor known

Counted when somebody asks, never on the way of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass

import numpy as np

from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.kv_cache_manager.holdings import holdings_of
from quire.engine_core.kv_cache_manager.kept import KeptSequences
from quire.engine_core.kv_cache_manager.swap_space import SwapSpace
from quire.engine_core.request import Sequence


@dataclass(frozen=True)
class MemoryAccount:
    """Slots by category; those of the device sum up to num_blocks * block_size."""

    block_size: int
    num_blocks: int
    num_host_blocks: int
    slots: dict[str, int]
    host_slots: dict[str, int]
    # blocks that the running sequences would hold beyond these, if each had its own
    num_blocks_saved_by_sharing: int


def account_for(
    pool: BlockPool,
    swap: SwapSpace,
    kept: KeptSequences,
    sequences: Iterable[Sequence],
    groups: Values[KVGroup],
    block_size: int,
) -> MemoryAccount:
    """Counts every block once."""
    filled = np.zeros(pool.num_blocks, dtype=np.int64)
    is_used, is_kept, is_pinned = (np.zeros(pool.num_blocks, dtype=np.bool_) for _ in range(3))
    used = holdings_of(list(sequences), groups, block_size)
    np.maximum.at(filled, used.block, used.num_filled)
    is_used[used.block] = True
    for one in kept:
        held = holdings_of([one], groups, block_size)
        np.maximum.at(filled, held.block, held.num_filled)
        (is_pinned if one.is_pinned else is_kept)[held.block] = True
    is_held = pool.counts > 0
    is_shared = (pool.counts > 1) & is_used & ~is_pinned
    is_kept_only = is_kept & ~is_used & ~is_pinned
    parts = {
        "token_states": is_held & ~is_shared & ~is_pinned & ~is_kept_only,
        "shared": is_shared,
        "kept": is_kept_only,
        "pinned": is_pinned,
    }
    slots = {name: int(filled[part].sum()) for name, part in parts.items()}
    slots["reserved"] = int(is_held.sum()) * block_size - sum(slots.values())
    slots["cached"] = pool.num_cached * block_size
    slots["free"] = (pool.num_available - pool.num_cached) * block_size
    return MemoryAccount(
        block_size=block_size,
        num_blocks=pool.num_blocks,
        num_host_blocks=swap.num_blocks,
        slots=slots,
        host_slots={
            "swapped": swap.num_used * block_size,
            "free": (swap.num_blocks - swap.num_used) * block_size,
        },
        num_blocks_saved_by_sharing=len(used.block) - int(is_used.sum()),
    )
