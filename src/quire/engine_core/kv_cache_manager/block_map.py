"""The block map: what every block holds at this moment, and for whom, as three columns of bytes.

Made when somebody looks, by a few operations over arrays, so that a map of ten thousand blocks holds up the engine for
less than a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass

import numpy as np

from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.kv_cache_manager.holdings import holdings_of
from quire.engine_core.kv_cache_manager.kept import KeptSequences
from quire.engine_core.request import Sequence
from quire.messages import int_array, split_sequence_id

FREE, CACHED, OWN, SHARED, KEPT, PINNED = range(6)
STATES = ("free", "cached", "own", "shared", "kept", "pinned")
# added to the state: not all slots are filled yet; it was copied on write a moment ago
NOT_FULL = 0x40
COPIED = 0x80
_NOBODY = 0xFFFF


@dataclass(frozen=True)
class BlockMap:
    """Entry i of each column is about block i."""

    num_blocks: int
    block_size: int
    # bytes: a state, and flags
    states: bytes
    # two bytes each, the low one first: the place in `sequences` of the first that holds it; 65535: none does
    owners: bytes
    # bytes: how many hold it, at most 255
    num_holders: bytes
    # (request, index) of the sequences that hold blocks
    sequences: list[tuple[int, int]]
    # blocks by state, in the order of STATES
    counts: list[int]
    # requests that have a part in a shared block
    num_sharing_requests: int


def map_of(
    pool: BlockPool,
    kept: KeptSequences,
    sequences: Values[Sequence],
    groups: Values[KVGroup],
    block_size: int,
    copied: Values[int] = (),
) -> BlockMap:
    """`copied` are the blocks that were copied on write a moment ago."""
    holding = [sequence for sequence in sequences if sequence.is_begun]
    held = holdings_of(holding, groups, block_size)
    is_held = pool.counts > 0
    states = np.where(is_held, OWN, FREE).astype(np.uint8)
    states[pool.cached_blocks()] = CACHED
    is_used = np.zeros(pool.num_blocks, dtype=np.bool_)
    is_used[held.block] = True
    states[is_used & (pool.counts > 1)] = SHARED
    num_filled = np.zeros(pool.num_blocks, dtype=np.int64)
    np.maximum.at(num_filled, held.block, held.num_filled)
    for one in kept:
        own = holdings_of([one], groups, block_size)
        np.maximum.at(num_filled, own.block, own.num_filled)
        states[own.block] = PINNED if one.is_pinned else np.where(is_used[own.block], states[own.block], KEPT)
    # a block that is pinned and kept as well is pinned
    for one in kept.pinned:
        states[holdings_of([one], groups, block_size).block] = PINNED
    counts = np.bincount(states, minlength=len(STATES)).tolist()
    owners = np.full(pool.num_blocks, _NOBODY, dtype="<u2")
    owners[held.block[::-1]] = held.holder[::-1]  # the last that is written is the first holder
    ids = int_array([sequence.sequence_id for sequence in holding])
    # a place in `holding` for each that has a part in a shared block
    has_part = np.flatnonzero(np.bincount(held.holder[states[held.block] == SHARED], minlength=1))
    owned = [split_sequence_id(number) for number in ids.tolist()]
    states[is_held & (num_filled < block_size)] |= NOT_FULL
    states[[block for block in copied if is_held[block]]] |= COPIED
    return BlockMap(
        num_blocks=pool.num_blocks,
        block_size=block_size,
        states=states.tobytes(),
        owners=owners.tobytes(),
        num_holders=np.minimum(pool.counts, 255).astype(np.uint8).tobytes(),
        sequences=owned,
        counts=counts,
        num_sharing_requests=len({owned[place][0] for place in has_part.tolist()}),
    )
