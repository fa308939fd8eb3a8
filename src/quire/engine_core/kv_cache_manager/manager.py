"""The KV cache manager (3.4.2, 4.2.2): block tables on demand, copy-on-write, prefix cache.

Owns the pool and decides what every block table says. It never decides who runs: the scheduler asks, and gets blocks
or None. What changed since the last step is collected here and fetched once a step by `take_changes`.

    sequence.block_tables[group]:  [ 7 | 1 | 3 ]         physical blocks, filled from left to right
                                     |   |   `- last block, partly filled: the only waste (3.4.3)
                                     |   `- count 2: shared with a fork, copied before it is written (3.4.4)
                                     `- known by hash: revived by the next prompt that begins like this one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.kv_cache_manager.prefix_cache import PrefixHasher
from quire.engine_core.request import Sequence
from quire.engine_core.rows import Rows
from quire.messages import IntArray, int_array

_NO_BLOCK = -1


@dataclass
class ComputedBlocks:
    """A prefix whose blocks are at hand: by group, one entry a block (-1 where a window has passed)."""

    num_tokens: int = 0
    blocks: list[list[int]] = field(default_factory=list)

    def held_blocks(self) -> list[int]:
        return [block for table in self.blocks for block in table if block != _NO_BLOCK]


class KVCacheManager:
    """Blocks for sequences. `hasher` is None when prefix caching is off."""

    def __init__(
        self, pool: BlockPool, groups: list[KVGroup], block_size: int, rows: Rows, hasher: PrefixHasher | None
    ) -> None:
        self.pool = pool
        self.groups = groups
        self.block_size = block_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_copied_blocks = 0
        self._rows = rows
        self._hasher = hasher
        self._writes: list[tuple[int, int, int, int]] = []
        self._source_by_copy: dict[int, int] = {}
        # Blocks that are read by a copy of this step must not be handed out again before it has run.
        self._late_releases: list[int] = []

    # ------------------------------------------------------------------------------------------ look-up

    def get_computed_blocks(self, sequence: Sequence) -> ComputedBlocks:
        """The longest prefix that every group can serve. Pure: references are taken in allocate_slots."""
        # At least one token is always computed: its hidden state is what the next token is sampled from.
        limit = (sequence.num_total_tokens - 1) // self.block_size
        if self._hasher is None or not self._looks_up(sequence) or limit <= 0:
            return ComputedBlocks(0, [[] for _ in self.groups])
        hashes = self._hasher.hashes(sequence, limit)
        length = self._longest_hit(hashes)
        blocks = [self._blocks_of_prefix(number, hashes, length) for number in range(len(self.groups))]
        return ComputedBlocks(length * self.block_size, blocks)

    def _looks_up(self, sequence: Sequence) -> bool:
        return self._hasher is not None and sequence.request.use_prefix_cache

    def _longest_hit(self, hashes: list[bytes]) -> int:
        """Blocks of the longest prefix that all groups can serve: one pass over the hashes, for any mix of windows."""
        is_whole = [group.sliding_window == 0 for group in self.groups]
        run_lengths = [0] * len(self.groups)
        longest = 0
        for index, content in enumerate(hashes):
            for number in range(len(self.groups)):
                is_there = self.pool.find((number, content)) is not None
                if is_whole[number] and not is_there:
                    return longest
                run_lengths[number] = run_lengths[number] + 1 if is_there else 0
            length = index + 1
            if all(run >= length - self._first_block(n, length) for n, run in enumerate(run_lengths)):
                longest = length
        return longest

    def _blocks_of_prefix(self, number: int, hashes: list[bytes], length: int) -> list[int]:
        first = self._first_block(number, length)
        found = [self.pool.find((number, content)) for content in hashes[first:length]]
        return [_NO_BLOCK] * first + [block for block in found if block is not None]

    def _first_block(self, number: int, num_blocks: int) -> int:
        """The first block of a prefix that this group still needs."""
        needed = self.groups[number].first_needed_block(num_blocks * self.block_size, self.block_size)
        return min(needed, num_blocks)

    # ------------------------------------------------------------------------------------------ allocation

    def allocate_slots(
        self, sequence: Sequence, num_new_tokens: int, computed: ComputedBlocks | None = None
    ) -> list[list[int]] | None:
        """Room for the next num_new_tokens: new blocks by group, or None and nothing has changed.

        With `computed` (a sequence that holds nothing yet) the prefix is held first and counts as computed.
        """
        start = computed.num_tokens if computed else sequence.num_computed_tokens
        tables = computed.blocks if computed else sequence.block_tables
        shared = self._shared_at(tables, start)
        target = -(-(start + num_new_tokens) // self.block_size)
        num_new = sum(max(0, target - len(table)) for table in tables)
        revived = self.num_revived_blocks([computed]) if computed else 0
        if num_new + len(shared) + revived > self.pool.num_available:
            return None
        if computed:
            self._attach(sequence, computed)
        self._copy_on_write(sequence, shared)
        new = [self._grow(sequence, number, target) for number in range(len(self.groups))]
        self._rows.writable_until[sequence.row] = target * self.block_size
        return new

    def num_missing_blocks(self, sequence: Sequence, computed: ComputedBlocks, step_tokens: int) -> int:
        """New blocks that the sequence needs beyond a prefix until all its tokens are computed."""
        total = sequence.num_total_tokens
        return sum(
            max(0, group.most_blocks(total, step_tokens, self.block_size) - sum(block != _NO_BLOCK for block in table))
            for group, table in zip(self.groups, computed.blocks, strict=True)
        )

    def num_revived_blocks(self, prefixes: Iterable[ComputedBlocks]) -> int:
        """Blocks of these prefixes that nobody holds now, so that holding them takes them out of the pool."""
        blocks = {block for prefix in prefixes for block in prefix.held_blocks()}
        return sum(self.pool.is_cached(block) for block in blocks)

    def _shared_at(self, tables: list[list[int]], position: int) -> list[tuple[int, int]]:
        """(group, index) of the blocks that the next token would be written into and that others hold as well."""
        index = position // self.block_size
        return [
            (number, index)
            for number, table in enumerate(tables)
            if index < len(table) and table[index] != _NO_BLOCK and self.pool.count(table[index]) > 1
        ]

    def _attach(self, sequence: Sequence, computed: ComputedBlocks) -> None:
        if self._looks_up(sequence) and not sequence.request.was_started:
            self.num_queried_tokens += sequence.num_total_tokens
            self.num_hit_tokens += computed.num_tokens
        self.pool.hold(computed.held_blocks())
        for number, blocks in enumerate(computed.blocks):
            sequence.block_tables[number] = list(blocks)
            self._writes.extend((number, sequence.row, index, max(block, 0)) for index, block in enumerate(blocks))
        sequence.num_cached_blocks = computed.num_tokens // self.block_size
        self._rows.next_block_end[sequence.row] = computed.num_tokens + self.block_size

    def _copy_on_write(self, sequence: Sequence, shared: list[tuple[int, int]]) -> None:
        """3.4.4: at most the last block of a sequence is ever copied."""
        for number, index in shared:
            table = sequence.block_tables[number]
            source, (target,) = table[index], self.pool.allocate(1)
            # A block that is itself copied in this step is not yet filled: copy from where its content comes.
            self._source_by_copy[target] = self._source_by_copy.get(source, source)
            self._release([source])
            table[index] = target
            self._writes.append((number, sequence.row, index, target))
            self.num_copied_blocks += 1

    def _grow(self, sequence: Sequence, number: int, target: int) -> list[int]:
        table = sequence.block_tables[number]
        blocks = self.pool.allocate(max(0, target - len(table)))
        self._writes.extend((number, sequence.row, len(table) + i, block) for i, block in enumerate(blocks))
        table.extend(blocks)
        return blocks

    # ------------------------------------------------------------------------------------------ sharing and freeing

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all blocks that its computed tokens and the next one lie in; the first writer copies."""
        num_blocks = -(-child.num_total_tokens // self.block_size)
        for number, table in enumerate(parent.block_tables):
            blocks = table[:num_blocks]
            self.pool.hold(block for block in blocks if block != _NO_BLOCK)
            child.block_tables[number] = list(blocks)
            self._writes.extend((number, child.row, index, max(block, 0)) for index, block in enumerate(blocks))
        num_full = child.num_computed_tokens // self.block_size
        child.block_hashes = parent.block_hashes[:num_full]
        child.num_cached_blocks = min(parent.num_cached_blocks, num_full)
        self._rows.next_block_end[child.row] = (child.num_cached_blocks + 1) * self.block_size
        # both must ask before they write next, because they now share the block they write into
        for sequence in (parent, child):
            self._rows.writable_until[sequence.row] = sequence.num_computed_tokens

    def free(self, sequence: Sequence) -> None:
        """All or nothing (3.4.5). Deepest blocks first, so that the beginning of a prompt is cached longest."""
        for table in sequence.block_tables:
            self._release(block for block in reversed(table) if block != _NO_BLOCK)
            table.clear()
        sequence.num_cached_blocks = 0
        self._rows.writable_until[sequence.row] = 0
        self._rows.next_block_end[sequence.row] = self.block_size

    def forget(self, sequence: Sequence) -> None:
        """Nobody finds the blocks of this sequence any more; who holds them keeps them."""
        for table in sequence.block_tables:
            for block in table:
                if block != _NO_BLOCK:
                    self.pool.forget(block)

    def cache_computed_blocks(self, sequence: Sequence) -> None:
        """Registers the blocks that are full and computed by now, and frees those that every window has passed."""
        num_computed = sequence.num_computed_tokens
        num_full = num_computed // self.block_size
        if self._hasher is not None:
            hashes = self._hasher.hashes(sequence, num_full)
            for index in range(sequence.num_cached_blocks, num_full):
                for number, table in enumerate(sequence.block_tables):
                    if table[index] != _NO_BLOCK:
                        self.pool.register(table[index], (number, hashes[index]))
        sequence.num_cached_blocks = num_full
        self._rows.next_block_end[sequence.row] = (num_full + 1) * self.block_size
        for number, group in enumerate(self.groups):
            if group.sliding_window:
                self._free_passed(
                    sequence.block_tables[number], group.first_needed_block(num_computed, self.block_size)
                )

    def _free_passed(self, table: list[int], first_needed: int) -> None:
        index = min(first_needed, len(table)) - 1
        while index >= 0 and table[index] != _NO_BLOCK:
            self._release([table[index]])
            table[index] = _NO_BLOCK
            index -= 1

    def _release(self, blocks: Iterable[int]) -> None:
        if not self._source_by_copy:
            self.pool.release(blocks)
            return
        for block in blocks:
            is_last = self.pool.count(block) == 1
            if is_last and block in self._source_by_copy.values():
                self._late_releases.append(block)
                continue
            if is_last:
                # nobody will read it, so a copy into it that has not run yet is not needed any more
                self._source_by_copy.pop(block, None)
            self.pool.release([block])

    # ------------------------------------------------------------------------------------------ per step

    def take_changes(self) -> tuple[IntArray, IntArray]:
        """(block_writes [4, n], block_copies [2, n]) since the last call; they belong to one step."""
        writes = int_array(self._writes).reshape(-1, 4).T
        copies = int_array([(source, target) for target, source in self._source_by_copy.items()]).reshape(-1, 2).T
        self._writes = []
        self._source_by_copy = {}
        late, self._late_releases = self._late_releases, []
        self.pool.release(late)
        return np.ascontiguousarray(writes), np.ascontiguousarray(copies)

    def most_blocks_of(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks that one sequence of that length can hold at once."""
        return sum(group.most_blocks(num_tokens, step_tokens, self.block_size) for group in self.groups)

    def statistics(self) -> dict[str, float]:
        return {
            "num_blocks": self.pool.num_blocks,
            "num_blocks_held": self.pool.num_held,
            "num_blocks_cached": self.pool.num_cached,
            "num_blocks_evicted_total": self.pool.num_evictions,
            "num_blocks_copied_total": self.num_copied_blocks,
            "num_prefix_queried_tokens_total": self.num_queried_tokens,
            "num_prefix_hit_tokens_total": self.num_hit_tokens,
        }

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        holders: Counter[int] = Counter(self._late_releases)
        for sequence in sequences:
            for table in sequence.block_tables:
                holders.update(block for block in table if block != _NO_BLOCK)
                # 3.4.3: waste is at most one block a sequence (fewer than block_size slots beyond the granted tokens)
                assert len(table) * self.block_size - sequence.num_total_tokens < self.block_size
        self.pool.check_invariants(dict(holders))
