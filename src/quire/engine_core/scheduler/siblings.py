"""Sequences of one request that begin one behind the other (3.4.5): who waits for whom.

Estimates count on it that the later one finds what the earlier one computed, and else several would compute the same,
each into blocks of its own. Changes nothing. Called by the scheduler.
"""

from __future__ import annotations

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Sequence
from quire.messages import IntArray


def awaited_sibling(sequence: Sequence, manager: KVCacheManager, granted: IntArray) -> Sequence | None:
    """The earlier sibling that has still to compute what this one, which holds nothing, is to find. `granted` holds the
    tokens of this step by row."""
    awaited, num_shared, num_there = None, 0, 0
    for sibling in sequence.request.sequences.values():
        if sibling is sequence:
            break
        num_tokens = manager.estimates.num_shared(sequence, [sibling]) * manager.block_size
        reached = sibling.num_computed_tokens + int(granted[sibling.row])
        num_there = max(num_there, min(num_tokens, reached))
        if num_tokens > num_shared:
            awaited, num_shared = sibling, num_tokens
    return awaited if num_there < num_shared else None
