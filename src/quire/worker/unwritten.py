"""Blocks that the core counts on and that hold nothing, because the row that was to write them has failed.

The core names a block when its tokens are granted, so another row may have found it in the same step, or in the next
one, which was decided before the failure was known. After that the core has forgotten the name, and whoever gets the
block writes it first. Empty as long as nothing fails, and then it costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.kv_connectors.connector import STEP_DATA, StepTransfers
from quire.messages import IntArray, SchedulerOutput
from quire.worker.row_table import RowTable


class UnwrittenBlocks:
    """By block, the step in which it was not written."""

    def __init__(self, table: RowTable, block_size: int, most_ahead: int = 1) -> None:
        """4.6.1: so many steps may have been decided before the results of another arrived."""
        self._most_ahead = most_ahead
        self._table = table
        self._block_size = block_size
        self.step_of: dict[int, int] = {}
        # the one that runs
        self.step = 0

    def open(self, scheduled: SchedulerOutput) -> None:
        """A step begins: what nobody can read any more is dropped, and what got its content from elsewhere."""
        oldest = scheduled.step - self._most_ahead
        self.step_of = {block: step for block, step in self.step_of.items() if step >= oldest}
        transfers: StepTransfers | None = scheduled.step_data.get(STEP_DATA)
        loaded = [table for load in transfers.loads for table in load.blocks] if transfers else []
        for blocks in (scheduled.swapped_in[1].tolist(), scheduled.block_copies[1].tolist(), *loaded):
            self._discard(blocks)

    def add(self, blocks: Iterable[int]) -> None:
        self.step_of.update(dict.fromkeys(blocks, self.step))

    def add_span(self, row: int, start: int, num_tokens: int) -> None:
        """The blocks that these tokens of a row lie in."""
        self.add(self._blocks_of(row, start, num_tokens))

    def discard_written(self, rows: IntArray, num_tokens: IntArray) -> None:
        """What these rows write in this step they got anew."""
        for row, count in zip(rows.tolist(), num_tokens.tolist(), strict=True):
            self._discard(self._blocks_of(row, int(self._table.num_computed[row]), count))

    def readers(self, rows: IntArray) -> list[int]:
        """Those of the rows that count one of these blocks as computed, and look back so far."""
        if not self.step_of:
            return []
        unwritten = set(self.step_of)
        computed = zip(rows.tolist(), self._table.num_computed[rows].tolist(), strict=True)
        return [row for row, count in computed if not unwritten.isdisjoint(self._read_by(row, count))]

    def _read_by(self, row: int, num_computed: int) -> list[int]:
        """Behind its window a row has blocks no longer: what stands there may be anybody's."""
        last = -(-num_computed // self._block_size)
        blocks: list[int] = []
        tables = self._attention_tables(row)
        for table, window in zip(tables, self._table.windows, strict=True):
            first = max(0, num_computed - window) // self._block_size if window else 0
            blocks += table[first:last].tolist()
        return blocks + self._state_blocks(row) if num_computed else blocks

    def _blocks_of(self, row: int, start: int, num_tokens: int) -> list[int]:
        if num_tokens <= 0:
            return []
        first = start // self._block_size
        last = -(-(start + num_tokens) // self._block_size)
        blocks: list[int] = self._attention_tables(row)[:, first:last].reshape(-1).tolist()
        return blocks + self._state_blocks(row)

    def _attention_tables(self, row: int) -> IntArray:
        return self._table.block_tables[: self._table.num_attention_groups, row]

    def _state_blocks(self, row: int) -> list[int]:
        """Every token reads and writes all of them."""
        blocks: list[int] = self._table.block_tables[-1:, row, : self._table.num_state_blocks].reshape(-1).tolist()
        return blocks

    def _discard(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            self.step_of.pop(int(block), None)
