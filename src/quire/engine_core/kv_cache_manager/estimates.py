"""How many blocks something will need: the questions that admission and recovery ask before they decide.

Pure: nothing is taken, nothing is moved. An answer may be too great (a window's peak, a fork that is never made), never
too small, so that what was admitted on it can also come back after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING

import numpy as np

from quire.engine_core.block_table import NO_BLOCK, Blocks, BlockTable
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.kv_cache_manager.prefix_cache import common_length
from quire.engine_core.request import Request, Sequence
from quire.messages import int_array

if TYPE_CHECKING:
    from quire.engine_core.kv_cache_manager.manager import KVCacheManager

Table = list[int] | BlockTable
# by group, of a sequence or of a prefix
Tables = ListOf[Table]


class Estimates:
    """Reads the manager's state."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._hasher = manager.cache.hasher
        self._pool = manager.pool
        self._kept = manager.kept
        self._swap = manager.swap
        self._is_simple = manager.steady.is_simple
        self._groups = manager.groups
        self._groups_of = manager.groups_of
        self._block_size = manager.block_size
        self._num_state_blocks = self._groups[-1].num_state_blocks
        self._num_attention = sum(not group.num_state_blocks for group in self._groups)

    def blocks_to_come(self, request: Request, step_tokens: int, num_more_tokens: int = 0) -> int:
        """Blocks that get out of reach until all tokens of the request are computed and it has got on by so many more.

        Each of its sequences may be the one that gets on: drafts make one faster than another, and the longest may end.
        """
        is_new = not request.was_started and len(request.sequences) == 1
        if is_new and not num_more_tokens and self._is_simple:
            (sequence,) = request.sequences.values()
            if not self._manager.get_computed_blocks(sequence).num_tokens:
                # nothing is at hand: a block for every so many tokens
                return -(
                    -min(sequence.num_total_tokens + self._manager.num_uncertain, request.max_total) // self._block_size
                )
        needed = of_a_fork = 0
        found: set[int] = set()
        if request.is_swapped:
            places = self._manager.swap_in_places(request)
            needed = sum(block is None for block in places.values())
            found.update(self._within_reach(int_array([block for block in places.values() if block is not None])))
        reach = max(request.longest + num_more_tokens, request.protected_until) if num_more_tokens else 0
        num_ahead = self._manager.num_uncertain + self._manager.lookahead
        earlier: list[Sequence] = []
        for sequence in request.sequences.values():
            tables: Tables = sequence.host_tables or sequence.block_tables
            num_shared = 0
            if sequence.is_begun or sequence.host_tables:
                # its last block may be shared by then, and is copied before it is written
                needed += self._num_attention if num_more_tokens and request.num_sequences > 1 else 0
            else:
                computed = self._manager.get_computed_blocks(sequence)
                num_whole = computed.num_tokens // self._block_size
                # one that is partly filled is copied before it is written, and so counts as missing
                if earlier and self._manager.may_miss_siblings:
                    # what is there now may have been passed when its turn comes; what it copies is held meanwhile
                    found.update(self._within_reach(computed.held_blocks(num_whole)))
                    found.update(self._within_reach(int_array(computed.blocks[-1] if self._num_state_blocks else ())))
                else:
                    found.update(self._within_reach(computed.held_blocks()))
                    tables = [blocks[:num_whole] for blocks in computed.blocks]
                    if self._num_state_blocks:
                        # a checkpoint that nobody holds may become its own
                        state = computed.blocks[-1]
                        tables[-1] = [] if any(self._pool.count(block) for block in state) else state
                    num_shared = self.num_shared(sequence, earlier)
            total = max(sequence.num_total_tokens + num_more_tokens, reach)
            total = min(total + num_ahead, request.max_total)
            needed += sum(
                self._num_missing(group, total, step_tokens, table, num_shared)
                for group, table in zip(self._groups_of(request), tables, strict=True)
            )
            of_a_fork = max(of_a_fork, self._num_of_a_fork(sequence, total, step_tokens))
            earlier.append(sequence)
        needed += self._num_state_copies(request)
        if num_more_tokens:
            needed += of_a_fork * request.num_reserved_rows
        # Siblings find the same blocks, cached or kept, which get out of reach once.
        return needed + len(found)

    def most_blocks(self, num_tokens: int, request: Request, step_tokens: int) -> int:
        """Most blocks that a request of so many sequences can need; what is certain to be shared counts once."""
        if self._is_simple:
            of_one = -(-num_tokens // self._block_size)
        else:
            groups = self._groups_of(request)
            of_one = sum(group.most_blocks(num_tokens, step_tokens, self._block_size) for group in groups)
        if request.num_sequences == 1:
            return of_one
        # After a preemption a window's blocks may be gone, so nothing is certain to be shared there.
        of_prompt = 0
        if not self._manager.may_miss_siblings:
            num_full = max(0, request.num_prompt_tokens - 1) // self._block_size
            of_prompt = request.uncut_blocks(num_full, self._block_size) * len(self._groups)
        return request.num_sequences * of_one - (request.num_sequences - 1) * of_prompt

    def pinned_hits(self, sequence: Sequence) -> int:
        """Full blocks of pinned prefixes that the sequence shares to its end; a window passes them sooner or later, and
        a state it copies. One that has begun shares what it holds, not what it would find if it began now."""
        pinned = self._kept.pinned_blocks
        if sequence.is_begun:
            num_computed = sequence.num_computed_tokens
            tables = [table.blocks.tolist() for table in sequence.block_tables]
        else:
            computed = self._manager.get_computed_blocks(sequence)
            num_computed = computed.num_tokens
            tables = computed.blocks
        num_full = num_computed // self._block_size
        return sum(
            block in pinned
            for group, table in zip(self._groups, tables, strict=True)
            for block in table[:num_full]
            if not (group.sliding_window or group.num_state_blocks)
        )

    def what_would_be_lost(self, request: Request) -> tuple[int, int]:
        """(computed blocks that are not in swap space yet, each once; tokens in those that nobody else holds)."""
        num_blocks = num_tokens = 0
        for number in range(len(self._groups)):
            tables = []
            fillings = []
            for sequence in request.sequences.values():
                num_computed = sequence.num_computed_tokens
                group = self._groups[number]
                table = sequence.block_tables[number].blocks[: group.num_blocks(num_computed, self._block_size)]
                tables.append(table)
                if group.num_state_blocks:
                    # without its state everything behind the last checkpoint is computed again: at worst, all
                    fillings.append(num_computed * (np.arange(len(table)) == 0))
                else:
                    fillings.append(group.num_filled(num_computed, len(table), self._block_size))
            blocks, first, own_counts = np.unique(np.concatenate(tables), return_index=True, return_counts=True)
            is_there = blocks != NO_BLOCK
            num_blocks += sum(not self._swap.knows(block) for block in blocks[is_there].tolist())
            is_lost = is_there & (self._pool.counts[blocks] <= own_counts)
            num_tokens = max(num_tokens, int(np.concatenate(fillings)[first][is_lost].sum()))
        return num_blocks, num_tokens

    def _within_reach(self, blocks: Blocks) -> list[int]:
        found: list[int] = self._pool.within_reach(blocks).tolist()
        return found

    def _num_missing(self, group: KVGroup, total: int, step_tokens: int, table: Table, num_shared: int) -> int:
        """Blocks that a sequence with this table needs in this group until so many tokens are computed."""
        blocks = table.blocks if isinstance(table, BlockTable) else int_array(table)
        num_held = int(np.count_nonzero(blocks != NO_BLOCK))
        to_write = -(-total // self._block_size) - max(len(blocks), num_shared)
        if group.num_state_blocks:
            return group.num_state_blocks - num_held
        # a window gives back behind what it takes in front
        return max(0, min(to_write, group.most_blocks(total, step_tokens, self._block_size) - num_held))

    def _num_of_a_fork(self, parent: Sequence, total: int, step_tokens: int) -> int:
        """Blocks that a fork to come has for itself: from the one in which it parts from its parent to its end."""
        shared = max(0, parent.num_known_tokens - 1) // self._block_size
        own = -(-total // self._block_size) - shared
        return sum(
            group.num_state_blocks or min(own, group.most_blocks(total, step_tokens, self._block_size))
            for group in self._groups_of(parent.request)
        )

    def _num_state_copies(self, request: Request) -> int:
        """Blocks of states that its sequences still share, and will not when they have got on."""
        if not self._num_state_blocks or len(request.sequences) == 1:
            return 0
        entries = [
            block
            for one in request.sequences.values()
            for block in (one.host_tables[-1] if one.host_tables else one.block_tables[-1])
        ]
        return len(entries) - len(set(entries))

    def num_shared(self, sequence: Sequence, earlier: list[Sequence]) -> int:
        """Full blocks that it will find computed by its siblings, which begin before it."""
        if not earlier or self._manager.may_miss_siblings:
            return 0
        hashes = self._hasher.hashes(sequence, (sequence.num_known_tokens - 1) // self._block_size)
        best = 0
        for other in earlier:
            theirs = self._hasher.hashes(other, other.num_known_tokens // self._block_size)
            # chained: where two hashes are equal, so are all before them
            best = max(best, common_length(hashes, theirs))
        return sequence.request.uncut_blocks(best, self._block_size)
