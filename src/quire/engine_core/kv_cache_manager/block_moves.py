"""What the worker must do to its memory before the next step: table entries, swaps and block copies.

Collected while a step is decided, fetched once by `take`. The worker applies it in this order: table entries, blocks to
the host, blocks from the host, copies, and only then anything is computed. Owned by the KV cache manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Values

import numpy as np

from quire.engine_core.block_table import Blocks
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.request import Request, Sequence
from quire.messages import IntArray, SchedulerOutput, int_array


class BlockMoves:
    """Differences of block tables and of block contents."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # columns of (group, row, index, block), in the order in which they were said
        self._writes: list[IntArray] = []
        # by where it goes: what was on its way to a place that has changed hands since is not needed any more
        self._block_by_host_block: dict[int, int] = {}
        self._host_block_by_block: dict[int, int] = {}
        self._host_blocks_read: set[int] = set()
        # sequences whose prefix is fetched from elsewhere
        self._fetching: set[int] = set()
        self._source_by_copy: dict[int, int] = {}
        self._num_reads: Counter[int] = Counter()
        # Blocks that are read by a copy of this step must not be handed out again before it has run.
        self.late_releases: list[int] = []
        self.num_swapped_out = 0
        self.num_swapped_in = 0

    @property
    def are_pending(self) -> bool:
        """The next step has something to move, or to free behind a copy."""
        return bool(self._writes) or self.are_contents_pending

    @property
    def are_contents_pending(self) -> bool:
        """Something beside entries of block tables."""
        return bool(
            self._source_by_copy or self._block_by_host_block or self._host_block_by_block or self.late_releases
        )

    def write(self, group: int, row: int, start: int, blocks: Values[int] | Blocks) -> None:
        """Table entries from `start` on. A block that is not there is never read: 0 will stand for it."""
        if not len(blocks):
            return
        columns = np.empty((4, len(blocks)), dtype=np.int64)
        columns[0] = group
        columns[1] = row
        columns[2] = np.arange(start, start + len(blocks))
        columns[3] = blocks
        self._writes.append(columns)

    def write_one_each(self, rows: IntArray, indices: list[int], blocks: list[int]) -> None:
        """One entry for each of many rows, in group 0."""
        self._writes.append(np.array([np.zeros(len(rows), dtype=np.int64), rows, indices, blocks]))

    def drop_writes(self, row: int) -> None:
        """Whose entries these were holds nothing any more, and a fork, which the worker does first, may get the row."""
        if self._writes:  # seldom: what a step has decided is taken before anybody ends
            others = (columns[:, columns[1] != row] for columns in self._writes)
            self._writes = [columns for columns in others if columns.size]

    def copy(self, source: int, target: int) -> None:
        # A block that is itself copied in this step is not yet filled: copy from where its content comes.
        origin = self.content_of(source)
        self._source_by_copy[target] = origin
        self._num_reads[origin] += 1

    def content_of(self, block: int) -> int:
        """Where the block's content lies until the copies of this step have run."""
        return self._source_by_copy.get(block, block)

    def take_back(self, target: int) -> int | None:
        """The source of a copy that nobody but this copy needs any more: the copy is not made, and its source can be
        had in the place of its target."""
        source = self._source_by_copy.get(target)
        if source is None or self._num_reads[source] != 1 or source not in self.late_releases:
            return None
        del self._source_by_copy[target]
        self._num_reads[source] = 0
        self.late_releases.remove(source)
        return source

    @property
    def has_copies(self) -> bool:
        """The step that is being decided may read blocks to copy them."""
        return bool(self._num_reads)

    def being_read(self) -> list[int]:
        """Blocks that cannot be handed out before the copies of this step have run."""
        return [block for block, num_reads in self._num_reads.items() if num_reads]

    def swap_out(self, block: int, host_block: int) -> None:
        # read before the copies, hence from the copy's source
        self._block_by_host_block[host_block] = self.content_of(block)

    def swap_in(self, host_block: int, block: int) -> None:
        self._host_block_by_block[block] = host_block
        self._host_blocks_read.add(host_block)

    def fetch(self, sequence: Sequence) -> None:
        """Blocks of its prefix are filled from elsewhere; a connector does it."""
        self._fetching.add(sequence.sequence_id)

    def is_bringing(self, request: Request) -> bool:
        """Some of its blocks are filled, from swap space or from elsewhere, only in the step to come."""
        if not self._fetching.isdisjoint(one.sequence_id for one in request.sequences.values()):
            return True
        coming = self._host_block_by_block
        return bool(coming) and any(
            block in coming
            for sequence in request.sequences.values()
            for table in sequence.block_tables
            for block in table
        )

    def reads_host_block(self, host_block: int) -> bool:
        """It must not be filled anew: blocks go to the host before others come from there."""
        return host_block in self._host_blocks_read

    def release(self, blocks: Blocks) -> None:
        """Gives blocks back to the pool, those that a copy still reads only once it has run."""
        if not self._source_by_copy and not self._host_block_by_block:
            self._pool.release(blocks)
            return
        for block in blocks.tolist():
            self._release_one(block)

    def _release_one(self, block: int) -> None:
        source = None
        if self._pool.count(block) == 1:
            if self._num_reads[block]:
                self.late_releases.append(block)
                return
            # nobody will read it, so what would be copied or swapped into it is not needed any more
            self._host_block_by_block.pop(block, None)
            source = self._source_by_copy.pop(block, None)
        self._pool.release(int_array([block]))
        if source is None:
            return
        self._num_reads[source] -= 1
        if not self._num_reads[source] and source in self.late_releases:
            # It must not wait for the step: if all have given way, the one that is to go on may need this block.
            self.late_releases.remove(source)
            self._release_one(source)

    def take_into(self, step: SchedulerOutput) -> None:
        """Everything since the last call belongs to this step."""
        if self._writes:
            writes = np.concatenate(self._writes, axis=1)
            np.maximum(writes[3], 0, out=writes[3])
            step.block_writes = writes
            self._writes = []
        if self._block_by_host_block:
            step.swapped_out = _columns((block, host) for host, block in self._block_by_host_block.items())
            self.num_swapped_out += len(self._block_by_host_block)
            self._block_by_host_block = {}
        if self._host_block_by_block:
            step.swapped_in = _columns((host, block) for block, host in self._host_block_by_block.items())
            self.num_swapped_in += len(self._host_block_by_block)
            self._host_block_by_block = {}
        if self._source_by_copy:
            step.block_copies = _columns((source, target) for target, source in self._source_by_copy.items())
            self._source_by_copy = {}
        # also of what was given up again before this step
        self._fetching.clear()
        self._host_blocks_read.clear()
        self._num_reads.clear()
        late = self.late_releases
        if late:
            self.late_releases = []
            self._pool.release(int_array(late))


def _columns(rows: Iterable[tuple[int, ...]]) -> IntArray:
    return np.ascontiguousarray(int_array(list(rows)).T)
