"""Where the memory of a KV cache is, by the kinds of figure 3.2: what holds tokens, and what is wasted in which way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Request
from quire.simulation.baselines.buddy_manager import BuddyManager, Pieces


@dataclass(frozen=True)
class MemoryUse:
    """Slots; all kinds together are the whole cache."""

    # hold keys and values
    token_states: float = 0
    # are held for tokens that will come
    reserved: float = 0
    # are held, and no token will ever come
    internal: float = 0
    # are free, or lost to the allocator: holes, and what it rounds up
    external: float = 0

    def __add__(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> MemoryUse:
        return MemoryUse(*(number * factor for number in astuple(self)))

    def shares(self) -> MemoryUse:
        return self * (1 / (sum(astuple(self)) or 1))


def memory_use(manager: KVCacheManager, requests: Iterable[Request]) -> MemoryUse:
    """Of what these hold, who run now."""
    total = manager.pool.num_blocks * manager.block_size
    if isinstance(manager, BuddyManager):
        pieces = manager.pieces()
        used = sum(
            (_of_pieces(one, pieces[one.request_id]) for one in requests if one.request_id in pieces), MemoryUse()
        )
    else:
        slots = manager.account(sequence for one in requests for sequence in one.sequences.values()).slots
        filled = sum(slots[name] for name in ("token_states", "shared", "kept", "pinned"))
        # less than a block of each sequence
        used = MemoryUse(token_states=filled, internal=slots["reserved"])
    return used + MemoryUse(external=total - sum(astuple(used)))


def _of_pieces(request: Request, pieces: Pieces) -> MemoryUse:
    """What rounding adds to a reservation is the allocator's, and so counts as external."""
    num_tokens = sum(sequence.num_computed_tokens for sequence in request.sequences.values())
    num_pieces = request.num_sequences
    will_be_used = request.max_total * num_pieces
    return MemoryUse(
        token_states=num_tokens,
        reserved=will_be_used - num_tokens,
        internal=pieces.num_tokens * num_pieces - will_be_used,
    )
