"""A KV cache manager that reserves contiguous memory by buddy allocation, as the paper assumes of Orca (3.6.1).

Stands in the place of the paged one, behind the same `get_computed_blocks` and `allocate_slots`; scheduler, rows and
worker are those of the engine. A request takes a piece for each of its sequences when it starts and keeps them to its
end, so nobody ever gives way, nothing is shared, and a fork copies all that its parent has computed.

    piece of a sequence:  [ tokens | reserved: it will be used | over-reserved: it never will be | rounding ]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.engine_core.block_table import BlockTable
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.estimates import Estimates
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.kv_cache_manager.prefix_cache import ComputedBlocks
from quire.engine_core.request import Request, Sequence
from quire.messages import IntArray, int_array
from quire.simulation.baselines.buddy_space import BuddySpace, power_of_two
from quire.simulation.baselines.reservations import Reservation


@dataclass
class Pieces:
    """Of one request: all of one size, by their first blocks."""

    size: int
    num_tokens: int
    unused: list[int]
    by_sequence: dict[int, int] = field(default_factory=dict)


class BuddyManager(KVCacheManager):
    """One group of layers, no swap space, no prefix cache."""

    def __init__(
        self,
        pool: BlockPool,
        groups: list[KVGroup],
        block_size: int,
        *further: Any,
        reservation: Reservation,
        **named: Any,
    ) -> None:
        super().__init__(pool, groups, block_size, *further, **named)
        assert len(groups) == 1, "contiguous memory is built for one group of layers"
        assert not self.swap.num_blocks, "nobody gives way here, so nobody is swapped"
        self.space = BuddySpace(pool.num_blocks)
        self.estimates = ReservedEstimates(self)
        self._reservation = reservation
        self._pieces: dict[int, Pieces] = {}

    # ------------------------------------------------------------------------------------------ what scheduling asks

    def get_computed_blocks(self, sequence: Sequence) -> ComputedBlocks:
        return ComputedBlocks(blocks=[[]])

    def allocate_slots(self, sequence: Sequence, num_new_tokens: int, computed: ComputedBlocks | None = None) -> bool:
        """With the first tokens comes room for all of them."""
        if sequence.is_begun:
            return True
        if not self._reserve(sequence.request):
            return False
        self._move_in(sequence)
        return True

    def name_granted(self, sequence: Sequence, num_computed: int, *, is_promise: bool = False) -> None:
        """Nobody finds anything here."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self._move_in(child)
        num_blocks = self.groups[0].num_blocks(child.num_computed_tokens, self.block_size)
        theirs = child.block_tables[0].first(num_blocks)
        for source, target in zip(parent.block_tables[0].first(num_blocks), theirs, strict=True):
            self.moves.copy(source, target)
        self.num_copied_blocks += num_blocks

    def free(self, sequence: Sequence) -> None:
        """The piece stays with the request, for forks to come, until its last sequence has ended."""
        request = sequence.request
        pieces = self._pieces.get(request.request_id)
        if pieces is None or sequence.sequence_id not in pieces.by_sequence:
            return
        sequence.block_tables[0].clear()
        self.moves.drop_writes(sequence.row)
        self._rows.set_named(sequence.row, 0)
        self._rows.may_write(sequence.row, 0)
        pieces.unused.append(pieces.by_sequence.pop(sequence.sequence_id))
        if pieces.by_sequence:
            return
        del self._pieces[request.request_id]
        for start in pieces.unused:
            self.moves.release(_blocks(start, pieces.size))
            self.space.give_back(start, pieces.size)

    # ------------------------------------------------------------------------------------------ pieces

    def num_blocks_of(self, request: Request) -> int:
        """Of one piece."""
        return power_of_two(-(-self._reservation(request) // self.block_size))

    def has_room_for(self, request: Request) -> bool:
        return self.space.num_pieces(self.num_blocks_of(request)) >= request.num_sequences

    def has_pieces(self, request: Request) -> bool:
        return request.request_id in self._pieces

    def pieces(self) -> dict[int, Pieces]:
        """By request."""
        return dict(self._pieces)

    def _reserve(self, request: Request) -> bool:
        """Pieces for all sequences that it will have, or none."""
        if self.has_pieces(request):
            return True
        if not self.has_room_for(request):
            return False
        size = self.num_blocks_of(request)
        taken = [self.space.take(size) for _ in range(request.num_sequences)]
        starts = [start for start in taken if start is not None]
        for start in starts:
            self.pool.take(_blocks(start, size))
        self._pieces[request.request_id] = Pieces(size, self._reservation(request), starts)
        return True

    def _move_in(self, sequence: Sequence) -> None:
        """Its table has as many blocks as it may come to use; the whole piece is taken."""
        pieces = self._pieces[sequence.request.request_id]
        start = pieces.unused.pop(0)
        pieces.by_sequence[sequence.sequence_id] = start
        num_blocks = min(pieces.size, -(-sequence.request.max_total // self.block_size))
        table = _blocks(start, num_blocks)
        sequence.block_tables[0] = BlockTable(table)
        self.moves.write(0, sequence.row, 0, table.tolist())
        self._rows.set_named(sequence.row, self._rows.tokens.shape[1])
        self._rows.may_write(sequence.row, num_blocks * self.block_size)

    def check_invariants(self, sequences: list[Sequence]) -> None:
        taken: list[int] = []
        for pieces in self._pieces.values():
            for start in (*pieces.unused, *pieces.by_sequence.values()):
                taken += range(start, start + pieces.size)
        assert len(taken) == len(set(taken)), "two pieces overlap"
        assert len(taken) + self.space.num_free == self.pool.num_blocks, "a piece was lost"
        late = set(self.moves.late_releases)
        held = set(np.flatnonzero(self.pool.counts).tolist())
        assert held - late == set(taken), "the pool and the pieces disagree"
        for sequence in sequences:
            if sequence.is_begun:
                start = self._pieces[sequence.request.request_id].by_sequence[sequence.sequence_id]
                assert sequence.block_tables[0][0] == start, "a table is not in its piece"


class ReservedEstimates(Estimates):
    """What starts needs a free piece for each sequence, and never anything more."""

    def __init__(self, manager: BuddyManager) -> None:
        super().__init__(manager)
        self._buddies = manager

    def blocks_to_come(self, request: Request, step_tokens: int, num_more_tokens: int = 0) -> int:
        if self._buddies.has_pieces(request):
            return 0
        needed = self._buddies.num_blocks_of(request) * request.num_sequences
        if self._buddies.has_room_for(request):
            return needed
        # free blocks there may be as many, but not in one piece: one more, and it is worth another look
        return max(needed, self._pool.num_available + 1)

    def most_blocks(self, num_tokens: int, request: Request, step_tokens: int) -> int:
        return power_of_two(-(-num_tokens // self._block_size)) * request.num_sequences

    def num_shared(self, sequence: Sequence, earlier: list[Sequence]) -> int:
        return 0


def _blocks(start: int, num_blocks: int) -> IntArray:
    return int_array(range(start, start + num_blocks))


def with_buddies(reservation: Reservation) -> Callable[..., KVCacheManager]:
    """For `make_scheduler`."""
    return lambda *parts, **named: BuddyManager(*parts, reservation=reservation, **named)
