"""Isolation inside a step: what one row cannot do to the others.

A step that raises has changed nothing but the cache, and what it wrote there it writes again. So its rows are run again
in halves, and a row that is alone by its tokens in halves, until those that cannot be computed stand alone; they fail,
and the others have what they would have had. Rows run in the order of num_computed: one that reads blocks which another
one writes in the same step (a prefix found there) comes after it. What a failed row did not write is remembered for as
long as somebody may read it, and who would read it fails too.

A step that takes far longer than its tokens do is ended in the middle, and runs again in halves in the same way, with
less patience: a row that takes too long alone fails, with all rows of its request.

Owns rows that failed, until the core lets go of them, and blocks that were promised and not written. Must never change
a number of a row: StepComputation does, when a part has been computed. Called by ModelRunner.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.messages import NUM_DRAFTS, IntArray, SchedulerOutput, StepOutput, int_array, split_sequence_id
from quire.worker.patience import Patience, TooLongError, Watch
from quire.worker.platforms import Platform
from quire.worker.row_table import RowTable
from quire.worker.step_computation import Computed, NotSampledError, StepComputation
from quire.worker.unwritten import UnwrittenBlocks

logger = logging.getLogger(__name__)
OUT_OF_MEMORY = "there was not enough memory to compute it."
TOO_LONG = "computing it took far longer than its tokens do, and held up all other requests."
READS_UNWRITTEN = "it shares the beginning of its prompt with a request that failed in the same step. Send it again."


@dataclass(frozen=True)
class _Means:
    """What a step is run and divided with."""

    computation: StepComputation
    table: RowTable
    platform: Platform
    patience: Patience
    watch: Watch
    unwritten: UnwrittenBlocks
    # by row
    requests: dict[int, int]


class StepIsolation:
    """Runs the rows of a step, all at once unless something goes wrong."""

    def __init__(
        self,
        computation: StepComputation,
        table: RowTable,
        platform: Platform,
        block_size: int,
        patience: Patience,
        most_ahead: int = 1,
    ) -> None:
        """`most_ahead`: as of `UnwrittenBlocks`."""
        self.computation = computation
        self._table = table
        self._platform = platform
        self._patience = patience
        self._watch = Watch()
        self._unwritten = UnwrittenBlocks(table, block_size, most_ahead)
        # by row
        self._requests: dict[int, int] = {}
        # where the core believes that each failed row stands
        self._failed: dict[int, int] = {}

    def close(self) -> None:
        self._watch.close()

    # ------------------------------------------------------------------------------------------ before a step

    def open(self, scheduled: SchedulerOutput) -> None:
        """Rows that the core has let go of, or placed elsewhere, since they failed."""
        self._unwritten.step = scheduled.step
        placed = [(one.row, one.sequence_id) for one in scheduled.admitted]
        placed += [(one.row, one.sequence_id) for one in scheduled.forked]
        for row, sequence_id in placed:
            self._requests[row] = split_sequence_id(sequence_id)[0]
        if not self._failed and not self._unwritten.step_of:
            return
        self._unwritten.open(scheduled)
        for row in (*scheduled.released, *dict(placed)):
            self._failed.pop(row, None)
        self._failed.update((row, place) for row, place in scheduled.progress if row in self._failed)

    def fail(self, row: int, blocks: Iterable[int] = ()) -> None:
        """Something about it went wrong before the step: it computes nothing, and these blocks have no content."""
        self._unwritten.add(blocks)
        self._failed[row] = int(self._table.num_computed[row])

    def has_failed(self, row: int) -> bool:
        """Perhaps in an earlier step than this one, which was decided before the core knew."""
        return row in self._failed

    def doubtful_blocks(self, failed: Iterable[int]) -> set[int]:
        """Those whose content nobody elsewhere should rely on: not written, or in the tables of rows that failed."""
        rows = list(failed)
        tables = self._table.block_tables[:, rows].reshape(-1).tolist() if rows else []
        return {*self._unwritten.step_of, *tables}

    # ------------------------------------------------------------------------------------------ a step

    def run(self, scheduled: SchedulerOutput, rows: IntArray, num_tokens: IntArray) -> StepOutput:
        """Of `scheduled`, these rows have so many tokens to compute."""
        if not len(rows):
            return StepOutput(step=scheduled.step, speculated=self.computation.report(scheduled))
        if self._failed or self._unwritten.step_of:
            return self._run_what_can_be(scheduled, rows, num_tokens)
        seconds = self._patience.of_step(int(num_tokens.sum()))
        try:
            computed = _compute(self.computation, self._watch, rows, num_tokens, seconds, scheduled.most_tokens)
        except Exception as error:
            return self._divide(scheduled, rows, num_tokens, error)
        return self.computation.commit(scheduled, computed)

    def _run_what_can_be(self, scheduled: SchedulerOutput, rows: IntArray, num_tokens: IntArray) -> StepOutput:
        for row, count in zip(scheduled.rows.tolist(), scheduled.num_tokens.tolist(), strict=True):
            if row in self._failed:  # the core does not know yet, and may have promised what it would have written
                self._unwritten.add_span(row, self._failed[row], count)
                self._failed[row] += count
        is_well = ~np.isin(rows, int_array(list(self._failed)))
        rows = rows[is_well]
        num_tokens = num_tokens[is_well]
        self._unwritten.discard_written(rows, num_tokens)
        return self._divide(scheduled, rows, num_tokens)

    def _divide(
        self, scheduled: SchedulerOutput, rows: IntArray, num_tokens: IntArray, error: Exception | None = None
    ) -> StepOutput:
        means = _Means(
            self.computation, self._table, self._platform, self._patience, self._watch, self._unwritten, self._requests
        )
        output, failed = _Division(means, scheduled, rows, num_tokens).run(error)
        self._failed.update(failed)
        return output


class _Division:
    """One step in parts."""

    def __init__(self, means: _Means, scheduled: SchedulerOutput, rows: IntArray, num_tokens: IntArray) -> None:
        self._means = means
        self._computation = means.computation
        self._table = means.table
        self._unwritten = means.unwritten
        self._scheduled = scheduled
        # who writes comes before who reads
        order = np.argsort(self._table.num_computed[rows], kind="stable")
        self._rows = rows[order]
        self._num_tokens = num_tokens[order]
        ends = self._table.num_computed[self._rows] + self._num_tokens
        self._ends: dict[int, int] = dict(zip(self._rows.tolist(), ends.tolist(), strict=True))
        asked = scheduled.step_data.get(NUM_DRAFTS)
        self._asked = np.zeros(self._table.num_rows, dtype=np.int64)
        if asked is not None:
            self._asked[scheduled.rows] = asked
        self._outputs: list[StepOutput] = []
        self._failures: dict[int, str] = {}
        self._counts: Counter[str] = Counter()

    def run(self, error: Exception | None) -> tuple[StepOutput, dict[int, int]]:
        """The answer, and where the core believes that each row stands which has failed. `error`: what became of all
        rows at once."""
        if error is None:
            self._attempt(self._rows, self._num_tokens)
        else:
            logger.error(
                "step %d failed; its %d rows run in parts", self._scheduled.step, len(self._rows), exc_info=error
            )
            self._divide(self._rows, self._num_tokens, error)
        if self._failures and not self._outputs:
            self._computation.check_model()
        if not self._failures and isinstance(_cause_of(error), TooLongError):
            self._means.patience.grow()
        self._table.check_invariants()
        return self._merged(), {row: self._ends[row] for row in self._failures}

    def _attempt(self, rows: IntArray, num_tokens: IntArray) -> None:
        rows, num_tokens = self._well(rows, num_tokens)
        readers = self._unwritten.readers(rows)
        if readers:
            for row in readers:
                self._fail(row, READS_UNWRITTEN)
            rows, num_tokens = self._well(rows, num_tokens)
        # drafts that turned out wrong in an earlier part are tokens that are not there any more
        rows, num_tokens = self._table.granted(rows, num_tokens)
        if not len(rows):
            return
        seconds = self._means.patience.of_part(int(num_tokens.sum()))
        try:
            computed = _compute(self._computation, self._means.watch, rows, num_tokens, seconds)
        except Exception as error:
            self._divide(rows, num_tokens, error)
            return
        # drafts follow the last token of a row, not a half of its tokens
        ends = np.minimum(self._table.num_total[rows], [self._ends[row] for row in rows.tolist()])
        is_last = self._table.num_computed[rows] + num_tokens >= ends
        part = self._part(rows, num_tokens, np.where(is_last, self._asked[rows], 0))
        self._outputs.append(self._computation.commit(part, computed))

    def _well(self, rows: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Without those that have failed."""
        is_well = ~np.isin(rows, int_array(list(self._failures)))
        return rows[is_well], num_tokens[is_well]

    def _divide(self, rows: IntArray, num_tokens: IntArray, error: Exception) -> None:
        """In halves; what cannot be divided has failed."""
        cause = _cause_of(error)
        self._look_at(cause)
        # Frames hold tensors, and memory may be what is short.
        for one in (error, cause):
            if one is not None:
                one.__traceback__ = None
        if len(rows) > 1:
            middle = len(rows) // 2
            self._attempt(rows[:middle], num_tokens[:middle])
            self._attempt(rows[middle:], num_tokens[middle:])
        elif isinstance(cause, TooLongError):
            self._fail_request(int(rows[0]))
        elif half := self._first_half(int(rows[0]), int(num_tokens[0]), error):
            self._attempt(rows, int_array([half]))
            self._attempt(rows, num_tokens - half)
        else:
            logger.error("row %d failed alone: %s: %s", rows[0], type(cause).__name__, cause)
            is_written = isinstance(error, NotSampledError)
            self._fail(int(rows[0]), _reason(cause), num_written=int(num_tokens[0]) if is_written else 0)

    def _first_half(self, row: int, num_tokens: int, error: Exception) -> int:
        """Of the tokens of a row that is alone; 0 if they cannot be divided."""
        if num_tokens < 2 or self._table.num_drafts[row] or isinstance(error, NotSampledError):
            return 0
        return self._computation.first_half(row, num_tokens)

    def _look_at(self, error: BaseException | None) -> None:
        if error is not None and self._means.platform.is_beyond_repair(error):
            raise error
        if is_out_of_memory(error) and not self._counts["num_out_of_memory"]:
            self._counts["num_out_of_memory"] = 1
            self._means.platform.release_memory()
        self._counts["num_divided_steps"] = 1

    def _fail(self, row: int, reason: str, num_written: int = 0) -> None:
        self._failures[row] = reason
        start = int(self._table.num_computed[row]) + num_written
        self._unwritten.add_span(row, start, self._ends[row] - start)

    def _fail_request(self, row: int) -> None:
        """Its other rows would take as long, one after another."""
        requests = self._means.requests
        num_computed = self._table.num_computed
        for sibling in self._rows.tolist():
            is_open = sibling not in self._failures and num_computed[sibling] < self._ends[sibling]
            if is_open and requests[sibling] == requests[row]:
                logger.error("row %d failed: its request takes too long", sibling)
                self._fail(sibling, TOO_LONG)

    def _part(self, rows: IntArray, num_tokens: IntArray, asked: IntArray) -> SchedulerOutput:
        has_speculation = NUM_DRAFTS in self._scheduled.step_data
        return SchedulerOutput(
            step=self._scheduled.step,
            rows=rows,
            num_tokens=num_tokens,
            step_data={NUM_DRAFTS: asked} if has_speculation else {},
        )

    def _merged(self) -> StepOutput:
        """One answer for all parts, whatever an answer consists of."""
        others = np.setdiff1d(self._scheduled.rows, self._rows)
        report = self._computation.report(self._part(others, np.zeros_like(others), self._asked[others]))
        merged = StepOutput(step=self._scheduled.step, failures=self._failures, speculated=report)
        for output in self._outputs:
            for name in StepOutput.__struct_fields__:
                if name == "counts":
                    self._counts.update(output.counts)
                elif name != "step":
                    setattr(merged, name, _together(getattr(merged, name), getattr(output, name)))
        merged.counts = dict(self._counts)
        return merged


def _compute(
    computation: StepComputation, watch: Watch, rows: IntArray, num_tokens: IntArray, seconds: float, most: int = 1
) -> Computed:
    """Undone behind the watch: its exception may come when all is computed, and would interrupt the undoing."""
    try:
        return watch.run(lambda: computation.compute(rows, num_tokens, most), seconds)
    except BaseException:
        computation.undo()
        raise


def _together(left: Any, right: Any) -> Any:
    """Columns behind each other, and what is said by row. A row may be in several parts: then its entries follow."""
    if isinstance(left, np.ndarray):
        return np.concatenate([left, right], axis=-1)
    if isinstance(left, list):
        return [*left, *right]
    for row, entries in right.items():
        left[row] = [*left[row], *entries] if row in left and isinstance(entries, list) else entries
    return left


def is_out_of_memory(error: BaseException | None) -> bool:
    """By name: each library has an exception of its own."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _cause_of(error: Exception | None) -> BaseException | None:
    return error.__cause__ if isinstance(error, NotSampledError) else error


def _reason(error: BaseException | None) -> str:
    """For the one who asked: nothing that tells of the machine."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    return f"computing it failed ({type(error).__name__}); the engine's log says more."
