"""The KV cache manager (3.4.2, 4.2.2): block tables on demand, copy-on-write, prefix cache, swap space.

Owns the pool and decides what every block table says. It never decides who runs: the scheduler asks, and gets blocks
or None. What changed since the last step is collected here and fetched once a step by `take_moves_into`.

    sequence.block_tables[group]:  [ 7 | 1 | 3 ]         physical blocks, filled from left to right
                                     |   |   `- last block, partly filled: the only waste (3.4.3)
                                     |   `- count 2: shared with a fork, copied before it is written (3.4.4)
                                     `- known by hash: revived by the next prompt that begins like this one
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from quire.engine_core.block_table import NO_BLOCK, BlockTable
from quire.engine_core.kv_cache_manager.accounting import MemoryAccount, account_for
from quire.engine_core.kv_cache_manager.block_map import BlockMap, map_of
from quire.engine_core.kv_cache_manager.block_moves import BlockMoves
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.checkpoints import Entry, StateCheckpoints
from quire.engine_core.kv_cache_manager.estimates import Estimates, Tables
from quire.engine_core.kv_cache_manager.groups import GroupsByLength, KVGroup
from quire.engine_core.kv_cache_manager.kept import KeptSequences
from quire.engine_core.kv_cache_manager.prefix_cache import ComputedBlocks, PrefixCache, PrefixHasher
from quire.engine_core.kv_cache_manager.steady_growth import SteadyGrowth
from quire.engine_core.kv_cache_manager.swap_space import SwapSpace
from quire.engine_core.request import Request, Sequence
from quire.engine_core.rows import Rows
from quire.failpoints import failpoint
from quire.messages import IntArray, SchedulerOutput, int_array


class KVCacheManager:
    """Blocks for sequences. A pool that keeps no contents serves requests from their own blocks only."""

    def __init__(
        self,
        pool: BlockPool,
        groups: list[KVGroup],
        block_size: int,
        rows: Rows,
        hasher: PrefixHasher,
        num_host_blocks: int = 0,
        lookahead: int = 0,
        num_uncertain: int = 0,
        checkpoint_interval: int = 1,
        checkpoint_share: float = 0.0,
        least_checkpoint: int = 0,
    ) -> None:
        self.pool = pool
        self.groups = groups
        self.groups_of = GroupsByLength(groups).of
        self.block_size = block_size
        # slots behind the granted ones that a proposer of drafts writes into
        self.lookahead = lookahead
        # tokens that were granted but may turn out not to be there: rejected drafts, in all steps in flight
        self.num_uncertain = num_uncertain
        self._hasher = hasher
        self.cache = PrefixCache(pool, groups, hasher)
        self.moves = BlockMoves(pool)
        self.kept = KeptSequences(pool, self.moves, groups, block_size, self.cache)
        self.swap = SwapSpace(min(num_host_blocks, pool.num_blocks), pool, self.moves)
        # by sequence, while those of one request begin
        self._found: dict[int, ComputedBlocks] = {}
        # whose state is copied in the step that is being decided, so that it can be found again
        self._left: list[tuple[Sequence, list[Entry]]] = []
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_copied_blocks = 0
        self._rows = rows
        # a group may lack blocks of a prefix
        self.has_windows = any(group.sliding_window or group.part for group in groups)
        self.num_state_blocks = groups[-1].num_state_blocks
        # what one sequence has computed, a sibling may not find
        self.may_miss_siblings = self.has_windows or self.num_state_blocks > 0
        self.checkpoints: StateCheckpoints | None = None
        if self.num_state_blocks:
            share, least = checkpoint_share, least_checkpoint
            self.checkpoints = StateCheckpoints(pool, self.cache, rows, checkpoint_interval, share, least)
        self.steady = SteadyGrowth(self, rows)
        self.estimates = Estimates(self)

    @property
    def keeps_contents(self) -> bool:
        """Blocks that nobody holds may be found again."""
        return self.pool.keeps_contents

    # ------------------------------------------------------------------------------------------ look-up

    def get_computed_blocks(self, sequence: Sequence) -> ComputedBlocks:
        """The longest prefix at hand. Pure: references are taken in allocate_slots."""
        computed = self.cache.longest_hit(sequence)
        if not self.kept.by_handle and not self._found:
            return computed
        computed = self.kept.extended(sequence, computed)
        # of what it continues, blocks may have been given up and live on in the cache, or were found and are held
        for other in (self.kept.continued(sequence), self._found.get(sequence.sequence_id)):
            if other is not None and other.num_tokens > computed.num_tokens:
                computed = other
        return computed

    def before_fetched(self, computed: ComputedBlocks, num_tokens: int) -> ComputedBlocks:
        """Of a prefix at hand, what is of use once so many tokens are there, most of them from elsewhere: windows have
        passed a part, and a state comes along."""
        if not self.may_miss_siblings:
            return computed
        tables = []
        for group, table in zip(self.groups, computed.blocks, strict=True):
            needed = min(group.first_needed_block(num_tokens, self.block_size), num_tokens // self.block_size)
            tables.append([] if group.num_state_blocks else [NO_BLOCK] * needed + table[needed:])
        return replace(computed, blocks=tables, state_name=b"")

    # ------------------------------------------------------------------------------------------ allocation

    def allocate_slots(self, sequence: Sequence, num_new_tokens: int, computed: ComputedBlocks | None = None) -> bool:
        """Room for the next num_new_tokens, or False and nothing has changed.

        With `computed` (a sequence that holds nothing yet) the prefix is held first and counts as computed.
        """
        if self.steady.is_simple and computed is None:
            return self._allocate_next(sequence, num_new_tokens)
        if self.steady.is_simple and computed is not None and not computed.num_tokens:
            return self._allocate_first(sequence, num_new_tokens, computed)
        if computed is None:
            self._free_passed(sequence)
        start = computed.num_tokens if computed else sequence.num_computed_tokens
        tables: Tables = computed.blocks if computed else sequence.block_tables
        groups = self.groups_of(sequence.request)
        shared = self._shared_at(groups, tables, start, is_taken=computed is not None)
        checkpoints = self.checkpoints
        spare = checkpoints.worth_a_copy(sequence, start, tables[-1], 0 if computed else 1) if checkpoints else []
        end = start + num_new_tokens
        ahead = min(end + self.lookahead, max(end, sequence.request.max_total))
        targets = [group.num_blocks(ahead, self.block_size) for group in groups]
        num_new = len(shared)
        for group, target, table in zip(groups, targets, tables, strict=True):
            num_new += len(group.kept_blocks(len(table), target, self.block_size))
        # The prefix is held first: what is evicted or given up to make room may be where it came from.
        prefix = computed.held_blocks() if computed else None
        if prefix is not None:
            self.pool.hold(prefix)
        if not self._make_available(num_new):
            if prefix is not None:
                self.pool.release(prefix[::-1])
            return False
        if computed:
            self._attach(sequence, computed)
        if checkpoints and spare and self.pool.num_available >= num_new + len(spare):
            checkpoints.leave(sequence, start, computed.state_name if computed else b"")
            self._left.append((sequence, spare))
            shared += spare
        elif checkpoints and spare and computed:
            checkpoints.take_over(sequence, spare)
        for number, index in shared:
            self._copy_on_write(sequence, number, index)
        for number, target in enumerate(targets):
            self._grow(sequence, number, target)
        # where lookahead reaches the greatest length, nothing more will be asked for
        self._rows.may_write(sequence.row, -(-ahead // self.block_size) * self.block_size - (ahead - end))
        failpoint("after_allocate", (sequence.request.request_id,))
        return True

    def _allocate_next(self, sequence: Sequence, num_tokens: int) -> bool:
        """The same for one that goes on, where a block is nothing but room for so many tokens."""
        table = sequence.block_tables[0]
        start = sequence.num_computed_tokens
        index = start // self.block_size
        is_shared = index < len(table) and self.pool.count(table[index]) > 1
        num_blocks = -(-(start + num_tokens) // self.block_size)
        if not self._make_available(is_shared + max(0, num_blocks - len(table))):
            return False
        if is_shared:
            self._copy_on_write(sequence, 0, index)
        self._grow(sequence, 0, num_blocks)
        self._rows.may_write(sequence.row, num_blocks * self.block_size)
        failpoint("after_allocate", (sequence.request.request_id,))
        return True

    def _allocate_first(self, sequence: Sequence, num_tokens: int, nothing: ComputedBlocks) -> bool:
        """For one that finds nothing, where a block is nothing but room for so many tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        if not self._make_available(num_blocks):
            return False
        self._count_hit(sequence, nothing)
        blocks = int_array(self.pool.allocate(num_blocks))
        sequence.block_tables[0] = BlockTable(blocks)
        self.moves.write(0, sequence.row, 0, blocks)
        self._rows.may_write(sequence.row, num_blocks * self.block_size)
        failpoint("after_allocate", (sequence.request.request_id,))
        return True

    @contextmanager
    def holding_prefixes(self, request: Request) -> Iterator[None]:
        """What its sequences find is held, and known, while they begin one after the other.

        For one an allocation may evict what another counts on, or take it from the session that both continue; with
        windows one lost block costs a whole prefix.
        """
        waiting = [one for one in request.sequences.values() if not one.is_begun]
        self._found = {one.sequence_id: self.get_computed_blocks(one) for one in waiting}
        prefixes = [computed.held_blocks() for computed in self._found.values()]
        for prefix in prefixes:
            self.pool.hold(prefix)
        try:
            yield
        finally:
            self._found = {}
            for prefix in prefixes:
                self.moves.release(prefix[::-1])

    @property
    def num_within_reach(self) -> int:
        """Blocks that can be had now: free, cached, or offered by kept sequences; not those that a copy still reads."""
        num_blocks = self.pool.num_within_reach
        if self.moves.has_copies:
            num_blocks -= len(self.pool.within_reach(int_array(self.moves.being_read())))
        return num_blocks

    @contextmanager
    def offering(self, requests: Iterable[Request]) -> Iterator[None]:
        """For a question: what is within reach if all of these give way."""
        sequences = [sequence for request in requests for sequence in request.sequences.values()]
        held = [table.held() for sequence in sequences for table in sequence.block_tables]
        for blocks in held:
            self.pool.offer(blocks)
        try:
            yield
        finally:
            for blocks in held:
                self.pool.withdraw(blocks)

    def give_up_for(self, request: Request) -> bool:
        """For one that has no room beside what it would begin behind: of what it continues the kept sequence gives up
        blocks, and the end of an answer, which it would copy, is found no more. False if there is neither."""
        if self.kept.give_up_blocks_of(request.message.continues):
            return True
        if self.checkpoints is None:
            return False
        names = [self.get_computed_blocks(one).state_name for one in request.sequences.values() if not one.is_begun]
        return any(map(self.checkpoints.give_up_end, names))

    def _make_available(self, num_blocks: int) -> bool:
        """Whether so many blocks can be had: free and cached ones, then those of checkpoints that this step was to
        leave behind, then those of kept sequences, which give up nothing in vain. Nobody who runs gives way here."""
        if self.pool.num_available >= num_blocks:
            return True
        self._take_checkpoints_back()
        if self.pool.num_available < num_blocks <= self.num_within_reach:
            self.kept.give_up_blocks(num_blocks)
        return self.pool.num_available >= num_blocks

    def _take_checkpoints_back(self) -> None:
        """Those of this step cost blocks that others need now: their sequences write on where they are."""
        left, self._left = self._left, []
        for sequence, entries in left:
            for number, index in entries:
                table = sequence.block_tables[number]
                target = table[index] if index < len(table) else NO_BLOCK
                source = self.moves.take_back(target)
                if source is not None:
                    self.pool.forget(source)
                    table[index] = source
                    self.moves.write(number, sequence.row, index, [source])
                    self.pool.release(int_array([target]))

    def _shared_at(
        self, groups: list[KVGroup], tables: Tables, position: int, *, is_taken: bool
    ) -> list[tuple[int, int]]:
        """(group, index) of the blocks that the next token would be written into and that others hold as well."""
        shared = []
        for number, (group, table) in enumerate(zip(groups, tables, strict=True)):
            # of a prefix that is about to be held, a block that is partly filled is copied; a state need not be
            is_copied = is_taken and not group.num_state_blocks
            most_holders = 0 if is_taken else 1
            for index in group.written_at(position, self.block_size):
                if index >= len(table) or table[index] == NO_BLOCK:
                    continue
                if is_copied or self.pool.count(table[index]) > most_holders:
                    shared.append((number, index))
        return shared

    def _count_hit(self, sequence: Sequence, computed: ComputedBlocks) -> None:
        if not sequence.request.was_started and sequence.looks_up:
            self.num_queried_tokens += sequence.num_total_tokens
            self.num_hit_tokens += computed.num_tokens
            if self.kept.by_handle:
                self.kept.count_hit(computed)
            if self.checkpoints is not None:
                self.checkpoints.count_hit(computed)

    def _attach(self, sequence: Sequence, computed: ComputedBlocks) -> None:
        """A prefix that is held already becomes the beginning of the sequence's block tables."""
        self._count_hit(sequence, computed)
        for number, blocks in enumerate(computed.blocks):
            sequence.block_tables[number] = BlockTable(blocks)
            self.moves.write(number, sequence.row, 0, blocks)
        self._rows.set_named(sequence.row, computed.num_tokens // self.block_size)

    def _copy_on_write(self, sequence: Sequence, number: int, index: int) -> None:
        """3.4.4: of a sequence's tokens at most the last block is ever copied, of its state all blocks."""
        table = sequence.block_tables[number]
        source, (target,) = table[index], self.pool.allocate(1)
        self.moves.copy(source, target)
        self.moves.release(int_array([source]))
        table[index] = target
        self.moves.write(number, sequence.row, index, [target])
        self.num_copied_blocks += 1

    def _grow(self, sequence: Sequence, number: int, target: int) -> None:
        table = sequence.block_tables[number]
        start = len(table)
        if target > start:
            kept = self.groups_of(sequence.request)[number].kept_blocks(start, target, self.block_size)
            blocks = int_array(self.pool.allocate(len(kept)))
            entries = blocks
            if len(kept) < target - start:
                entries = np.full(target - start, NO_BLOCK, dtype=np.int64)
                entries[kept.start - start : kept.stop - start] = blocks
            if len(kept):
                self.moves.write(number, sequence.row, kept.start, blocks)
            table.extend(entries)

    def _free_passed(self, sequence: Sequence) -> None:
        """Blocks that every later token's window has passed go back."""
        if not self.has_windows:
            return
        for table, group in zip(sequence.block_tables, self.groups_of(sequence.request), strict=True):
            first_needed = group.first_needed_block(sequence.num_sure_tokens, self.block_size)
            passed = table.blocks[: min(first_needed, len(table))]
            start = len(passed)
            while start > 0 and passed[start - 1] != NO_BLOCK:
                start -= 1
            self.moves.release(passed[start:][::-1].copy())
            passed[start:] = NO_BLOCK

    # ------------------------------------------------------------------------------------------ names

    def name_granted(self, sequence: Sequence, num_computed: int, *, is_promise: bool = False) -> None:
        """The blocks that are full once the granted tokens are computed can be found from now on.

        As far as their tokens are known: the name of a block that a step in flight completes waits for that step.
        """
        num_computed = min(num_computed, sequence.num_known_tokens)
        num_full = num_computed // self.block_size
        if num_full and not sequence.is_unnamed:
            self.cache.name_blocks(sequence, num_computed, is_promise=is_promise)
        self._rows.set_named(sequence.row, num_full)

    def end_output(self, sequence: Sequence, num_settled: int) -> None:
        """It is about to be freed; so many of its tokens are surely computed. Its last blocks, whose tokens have only
        now become known, and its state can be found from now on."""
        if sequence.is_begun:
            self.name_granted(sequence, sequence.num_sure_tokens)
            if self.checkpoints is not None:
                self.checkpoints.leave_end(sequence, num_settled)

    # ------------------------------------------------------------------------------------------ sharing and freeing

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all blocks that its tokens lie in; the first of both to write into the last one copies it.

        The worker copies the table with the row, so nothing is written here.
        """
        for number, (group, table) in enumerate(zip(self.groups, parent.block_tables, strict=True)):
            num_blocks = group.num_blocks(child.num_total_tokens, self.block_size)
            child.block_tables[number] = shared = table.first(num_blocks)
            self.pool.hold(shared.held())
        num_full = child.num_computed_tokens // self.block_size
        child.block_hashes += parent.block_hashes[:num_full]
        self._rows.set_named(child.row, min(parent.num_named_blocks, num_full))
        for sequence in (parent, child):
            self.must_ask(sequence)

    def must_ask(self, sequence: Sequence) -> None:
        """The block that it writes into next may be shared by now. One that has given way holds none."""
        if sequence.is_begun:
            self._rows.may_write(sequence.row, sequence.num_computed_tokens)

    def free(self, sequence: Sequence) -> None:
        """All or nothing (3.4.5), here and in swap space."""
        self._free_here(sequence)
        if sequence.host_tables:
            self.swap.free(sequence)

    def _free_here(self, sequence: Sequence) -> None:
        """Deepest blocks first, so that the beginning of a prompt is cached longest; before them the state, which is of
        no use without all of them."""
        for table in sequence.block_tables[::-1] if self.num_state_blocks else sequence.block_tables:
            self.moves.release(table.held()[::-1])
            table.clear()
        if sequence.row >= 0:
            self.moves.drop_writes(sequence.row)
            self._rows.hold_nothing(sequence.row)

    def forget(self, sequence: Sequence) -> None:
        """Nobody finds the blocks of this sequence any more; who holds them keeps them."""
        for table in sequence.block_tables:
            for block in table.held().tolist():
                key = self.pool.key_of(block)
                if key is not None:
                    self.swap.forget(key)
                    self.pool.forget(block)
        self.kept.name_pinned()  # a pinned prefix was computed long before

    def rename_blocks(self, weights_version: bytes) -> None:
        """Blocks that are computed from now on have other names than those before, of which none is found again."""
        self._hasher.weights_version = weights_version
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Only pinned prefixes can still be found."""
        self.pool.forget_all()
        self.swap.forget_all()
        self.kept.name_pinned()

    # ------------------------------------------------------------------------------------------ swap space (3.4.5)

    def swap_out(self, request: Request) -> int:
        """Computed blocks go to the host, all blocks back to the pool. How many are moved; there is room for them."""
        for sequence in request.sequences.values():
            self._free_passed(sequence)
        num_used = self.swap.num_used
        self.swap.swap_out(request, self.groups, self.block_size)
        for sequence in request.sequences.values():
            self._free_here(sequence)
        return self.swap.num_used - num_used

    def is_bringing(self, request: Request) -> bool:
        """The step that is being decided fills some of its blocks, from swap space or from elsewhere."""
        return self.moves.is_bringing(request)

    def swap_in(self, request: Request) -> int:
        """The request comes back, sharing what it shared. How many blocks are moved; the cache may still have some."""
        places = self.swap_in_places(request)
        found = {host: block for host, block in places.items() if block is not None}
        missing = [host for host, block in places.items() if block is None]
        # Found blocks are held before anything is allocated: an allocation may evict what nobody holds.
        held_once = int_array(sorted(set(found.values())))
        self.pool.hold(held_once)
        self._make_available(len(missing))
        allocated = self.pool.allocate(len(missing))
        for host_block, block in zip(missing, allocated, strict=True):
            self.moves.swap_in(host_block, block)
        found.update(zip(missing, allocated, strict=True))
        for sequence in request.sequences.values():
            self._attach_from_host(sequence, found)
            self.swap.free(sequence)
        # each sequence holds its own by now
        self.pool.release(int_array([*held_once.tolist(), *allocated]))
        return len(missing)

    def _attach_from_host(self, sequence: Sequence, block_of: dict[int, int]) -> None:
        for number, host_table in enumerate(sequence.host_tables):
            table = BlockTable([block_of.get(host_block, NO_BLOCK) for host_block in host_table])
            sequence.block_tables[number] = table
            self.pool.hold(table.held())
            self.moves.write(number, sequence.row, 0, table.blocks.tolist())
        self._rows.set_named(sequence.row, 0)
        self._rows.may_write(sequence.row, sequence.num_computed_tokens)

    def swap_in_places(self, request: Request) -> dict[int, int | None]:
        """For each host block of the request: the block that has its content already, or None."""
        places: dict[int, int | None] = {}
        for sequence in request.sequences.values():
            num_full = min(sequence.num_computed_tokens, sequence.num_known_tokens) // self.block_size
            hashes = self._hasher.hashes(sequence, num_full)
            for number, table in enumerate(sequence.host_tables):
                for index, host_block in enumerate(table):
                    if host_block == NO_BLOCK or host_block in places:
                        continue
                    is_named = index < num_full and not self.groups[number].num_state_blocks
                    places[host_block] = self.cache.find_computed(number, hashes[index]) if is_named else None
        return places

    # ------------------------------------------------------------------------------------------ per step

    def take_moves_into(self, step: SchedulerOutput) -> None:
        """What changed since the last call belongs to this step."""
        self._left = []
        self.moves.take_into(step)
        if self.swap.late_releases:
            self.swap.settle()
        self.cache.step_decided()

    def step_settled(self) -> None:
        """The results of the earliest step that was decided are there."""
        self.cache.step_settled()

    # ------------------------------------------------------------------------------------------ what can be seen

    def account(self, sequences: Iterable[Sequence]) -> MemoryAccount:
        """Where every slot is (docs/kv-cache.md)."""
        return account_for(self.pool, self.swap, self.kept, sequences, self.groups, self.block_size)

    def block_map(self, sequences: list[Sequence], copied: list[int]) -> BlockMap:
        """What every block holds, and for whom; `copied` were copied on write a moment ago (docs/observability.md)."""
        return map_of(self.pool, self.kept, sequences, self.groups, self.block_size, copied)

    def statistics(self) -> dict[str, float]:
        return {
            "num_blocks": self.pool.num_blocks,
            "num_blocks_held": self.pool.num_held,
            "num_blocks_cached": self.pool.num_cached,
            "num_blocks_evicted_total": self.pool.num_evictions,
            "num_lost_names": len(self.pool.lost),
            "num_blocks_copied_total": self.num_copied_blocks,
            "num_prefix_queried_tokens_total": self.num_queried_tokens,
            "num_prefix_hit_tokens_total": self.num_hit_tokens,
            "swapped_out_blocks_total": self.moves.num_swapped_out,
            "swapped_in_blocks_total": self.moves.num_swapped_in,
            "num_kept_sequences": len(self.kept.by_handle),
            "num_pinned_prefixes": len(self.kept.pinned),
            **(self.checkpoints.statistics() if self.checkpoints is not None else {}),
        }

    def check_invariants(self, sequences: list[Sequence]) -> None:
        most_slots_ahead = self.block_size + self.lookahead + self.num_uncertain - 1
        for sequence in sequences:
            # 3.4.3: waste is at most one block a sequence (fewer than block_size slots beyond the granted tokens)
            of_tokens = sequence.block_tables[:-1] if self.num_state_blocks else sequence.block_tables
            num_slots = max(map(len, of_tokens), default=0) * self.block_size
            assert num_slots - sequence.num_total_tokens <= most_slots_ahead, "more blocks than its tokens need"
            of_state = len(sequence.block_tables[-1]) if self.num_state_blocks else 0
            assert of_state == self.num_state_blocks * sequence.is_begun, "a part of a state"
        holding = [table for one in (*sequences, *self.kept) for table in one.block_tables]
        if self.moves.late_releases:
            holding.append(BlockTable(self.moves.late_releases))
        offered = [table for one in self.kept if not one.is_pinned for table in one.block_tables]
        self.pool.check_invariants(self._num_entries(holding), self._num_entries(offered))
        self.swap.check_invariants(sequences)
        if self.checkpoints is not None:
            self.checkpoints.check_invariants()

    def _num_entries(self, tables: list[BlockTable]) -> IntArray:
        """By block. NO_BLOCK is counted in front of them all."""
        if not tables:
            return np.zeros(self.pool.num_blocks, dtype=np.int64)
        entries = np.concatenate([table.blocks for table in tables])
        return np.bincount(entries - NO_BLOCK, minlength=self.pool.num_blocks - NO_BLOCK)[-NO_BLOCK:]
