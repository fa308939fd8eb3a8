"""What comes back from a step: tokens become known, drafts are settled, stop rules are held against what was sampled.

Takes steps out of flight. Others may have been decided before the results of one arrive (4.6.1), so what comes back is
held against what has changed since: a row may have ended, changed hands, or been set back to be computed again. Called
by the scheduler alone.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Sequence
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.first_tokens import FirstTokens
from quire.engine_core.scheduler.lifecycle import ClientEvents, Lifecycle
from quire.engine_core.scheduler.running import StepInFlight, StepsInFlight
from quire.engine_core.scheduler.speculation import Speculation
from quire.messages import (
    NO_INTS,
    STEP_COUNTS,
    Candidates,
    EngineOutputs,
    IntArray,
    SequenceLogprobs,
    StepOutput,
    TokenLogprobs,
    int_array,
)


class Results:
    """Settles steps in the order in which they were decided."""

    def __init__(
        self,
        manager: KVCacheManager,
        rows: Rows,
        lifecycle: Lifecycle,
        speculation: Speculation,
        in_flight: StepsInFlight,
        first_tokens: FirstTokens,
    ) -> None:
        self.in_flight = in_flight
        self.num_dropped_tokens = 0
        self.num_dropped_outputs = 0
        # outputs that came before it was their turn, by step
        self._early: dict[int, StepOutput] = {}
        # what the workers counted, over all steps
        self.counts = Counter(dict.fromkeys(STEP_COUNTS, 0))
        self._manager = manager
        self._recorder = lifecycle.recorder
        self._rows = rows
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._speculation = speculation
        self._first_tokens = first_tokens

    def settle(self, output: StepOutput) -> EngineOutputs:
        """The messages to the client that follow from one step."""
        if not self.in_flight or self.in_flight[0].step != output.step:
            return self._out_of_turn(output)
        result = self._settle(output)
        if self._early:
            self._settle_early(result)
        self.take_events(result)
        return result

    def _settle(self, output: StepOutput) -> EngineOutputs:
        decided = self.in_flight.popleft()
        self.in_flight.settled_at = decided.num_changes
        self._rows.settle()
        if output.counts:
            self.counts.update(output.counts)
        self._manager.step_settled()
        self._recorder.settled(output.step)
        result = EngineOutputs(step=output.step)
        if output.prompt_logprobs:
            result.prompt_logprobs = self._by_sequence(output.prompt_logprobs, decided)
        for row, positions in output.prompt_logprobs.items():
            if self._is_as_decided(row, decided):
                self._running.sequence_at(row).request.num_reported_positions += len(positions)
        if output.failures:
            # First, because a decoding method may give the row of one that ended to another one.
            self._end_failed(output, decided)
        if output.vectors:
            self._end_pooled(output.vectors, decided)
        if output.speculated.size:
            self._settle_drafts(output.speculated, decided)
        rows, token_ids, ends = self._learned(output, decided)
        result.sequence_ids = self._rows.sequence_id[rows]
        result.token_ids = token_ids
        result.firsts = self._first_tokens.come(rows, decided.num_decided)
        result.logprobs = self._logprobs_of(output.logprobs, decided, rows)
        # Looked up before a decoding method gives rows away.
        by_request: dict[int, dict[int, Candidates]] = {}
        if output.candidates:
            answers = {row: found for row, found in output.candidates.items() if self._is_answer(row, decided)}
            by_request = self._lifecycle.answers_of(answers)
        self._lifecycle.show_tokens(rows)
        if by_request:
            self._lifecycle.show_candidates(by_request)
        self._lifecycle.end_blamed()  # before a stop rule ends them as if all were well
        for row, token, is_stop in ends:
            self._end(row, token, is_stop)
        self._lifecycle.end_blamed()
        return result

    def _out_of_turn(self, output: StepOutput) -> EngineOutputs:
        """One that comes early waits for its turn; one that nobody waits for (twice, late, unknown) is dropped."""
        is_early = any(decided.step == output.step for decided in self.in_flight) and output.step not in self._early
        if is_early:
            self._early[output.step] = output
        else:
            self.num_dropped_outputs += 1
        result = EngineOutputs(step=0)
        self.take_events(result)
        return result

    def _settle_early(self, result: EngineOutputs) -> None:
        """Those whose turn has come by now, added to what came before them."""
        while self.in_flight and (output := self._early.pop(self.in_flight[0].step, None)) is not None:
            found = self._settle(output)
            result.sequence_ids = np.concatenate([result.sequence_ids, found.sequence_ids])
            result.token_ids = np.concatenate([result.token_ids, found.token_ids])
            result.firsts = [*result.firsts, *found.firsts]
            result.logprobs = [*result.logprobs, *found.logprobs]
            result.prompt_logprobs = [*result.prompt_logprobs, *found.prompt_logprobs]

    def take_events(self, outputs: EngineOutputs) -> None:
        """Begins, chosen tokens and ends since the last call, put into a message to the client."""
        events = self._lifecycle.events
        self._lifecycle.events = ClientEvents()
        outputs.starts = events.starts
        outputs.ends = events.ends
        outputs.vectors = events.vectors
        if events.tokens:
            # First: what was put where a sequence waits comes before what it samples then.
            sequence_ids, token_ids = int_array(events.tokens).T
            outputs.sequence_ids = np.concatenate([sequence_ids, outputs.sequence_ids])
            outputs.token_ids = np.concatenate([token_ids, outputs.token_ids])
            outputs.logprobs = [*events.logprobs, *outputs.logprobs]

    # ------------------------------------------------------------------------------------------ what it is about

    def _is_as_decided(self, row: int, decided: StepInFlight) -> bool:
        """The row still belongs to the sequence that the step computed."""
        return self._running.find(row) is not None and bool(self._rows.left_at[row] <= decided.num_changes)

    def _are_as_decided(self, rows: IntArray, decided: StepInFlight) -> npt.NDArray[np.bool_]:
        is_there: npt.NDArray[np.bool_] = self._rows.left_at[rows] <= decided.num_changes
        return is_there & (self._rows.sequence_id[rows] >= 0)

    def _is_answer(self, row: int, decided: StepInFlight) -> bool:
        """One that was computed again may answer twice, the second time when its next token has been chosen."""
        return self._is_as_decided(row, decided) and bool(self._rows.appended_at[row] <= decided.num_changes)

    def _learned(
        self, output: StepOutput, decided: StepInFlight
    ) -> tuple[IntArray, IntArray, list[tuple[int, int, bool]]]:
        """(rows, tokens, ends): the tokens that are new, cut behind the first that ends a sequence."""
        rows = output.rows
        token_ids = output.token_ids
        if len(rows) != len(decided.rows) or np.count_nonzero(rows != decided.rows):
            was_decided = self._was_decided(rows, decided)
            if not was_decided.all():  # nobody would know whose tokens these are
                self.num_dropped_tokens += len(rows) - int(was_decided.sum())
                rows = rows[was_decided]
                token_ids = token_ids[was_decided]
        if self._rows.num_changes != decided.num_changes:
            is_there = self._are_as_decided(rows, decided)
            self.num_dropped_tokens += len(rows) - int(is_there.sum())
            rows = rows[is_there]
            token_ids = token_ids[is_there]
        if not output.speculated.size:
            self._rows.learn(rows, token_ids)
            ends = self._ends_of(rows, token_ids, self._rows.num_known[rows])
            return rows, token_ids, [(int(rows[i]), int(token_ids[i]), is_stop) for i, is_stop in ends]
        return self._learn_several(rows, token_ids)

    def _was_decided(self, rows: IntArray, decided: StepInFlight) -> npt.NDArray[np.bool_]:
        """Which of these rows the step was about."""
        # one place more than there are rows: what is out of range finds False there
        was_decided = np.zeros(self._rows.num_rows + 1, dtype=np.bool_)
        was_decided[decided.rows] = True
        found: npt.NDArray[np.bool_] = was_decided[np.where((rows >= 0) & (rows < self._rows.num_rows), rows, -1)]
        return found

    def _learn_several(
        self, rows: IntArray, token_ids: IntArray
    ) -> tuple[IntArray, IntArray, list[tuple[int, int, bool]]]:
        """Each row's tokens stand together. What was accepted behind a stop is dropped."""
        numbers = _numbers_in_runs(rows)
        ends = []
        first_ends = {}
        for i, is_stop in self._ends_of(rows, token_ids, self._rows.num_known[rows] + numbers + 1):
            if int(rows[i]) not in first_ends:
                first_ends[int(rows[i])] = int(numbers[i])
                ends.append((int(rows[i]), int(token_ids[i]), is_stop))
        if first_ends:
            pairs = zip(rows.tolist(), numbers.tolist(), strict=True)
            is_kept = np.array([number <= first_ends.get(row, number) for row, number in pairs], dtype=np.bool_)
            self.num_dropped_tokens += len(rows) - int(is_kept.sum())
            rows = rows[is_kept]
            token_ids = token_ids[is_kept]
            numbers = numbers[is_kept]
        for number in range(int(numbers.max(initial=-1)) + 1):
            self._rows.learn(rows[numbers == number], token_ids[numbers == number])
        return rows, token_ids, ends

    def _ends_of(self, rows: IntArray, token_ids: IntArray, totals: IntArray) -> list[tuple[int, bool]]:
        """3.2.2: (position, whether by a stop token, not by length) of those that end a sequence."""
        is_end = totals >= self._rows.max_total[rows]
        is_stop = self._rows.stop_ids[rows] == token_ids[:, None]
        # counted, which takes a fraction of what `any` does with so few
        if not np.count_nonzero(is_stop):
            return [(i, False) for i in is_end.nonzero()[0].tolist()] if np.count_nonzero(is_end) else []
        stops = is_stop.any(axis=1) & (totals >= self._rows.min_total[rows])
        return [(i, bool(stops[i])) for i in (stops | is_end).nonzero()[0].tolist()]

    def _end(self, row: int, token: int, is_stop: bool) -> None:
        sequence = self._running.find(row)
        if sequence is None:
            return  # its decoding method has dropped it
        with self._lifecycle.blaming(sequence.request, "it could not be ended"):
            if not is_stop:
                self._lifecycle.end_output(sequence, "length")
                return
            asked_for = token in sequence.request.asked_for_ids
            self._lifecycle.end_output(sequence, "stop", stop_reason=token if asked_for else None)

    # ------------------------------------------------------------------------------------------ drafts (4.4.4)

    def _settle_drafts(self, speculated: IntArray, decided: StepInFlight) -> None:
        """The worker says where its rows stand; on top of that comes what has been decided since.

        computed += granted - rejected, total += drafts - rejected + 1: the sums are the worker's.
        """
        speculated = speculated[:, self._was_decided(speculated[0], decided)]
        speculated = speculated[:, self._are_as_decided(speculated[0], decided)]
        rows, computed, totals = speculated[:3]
        granted, growth = np.zeros((2, self._rows.num_rows), dtype=np.int64)
        for later in self.in_flight:
            granted[later.rows] += later.num_tokens
            growth[later.rows] += later.growth
        num_expected = self._rows.num_computed[rows]
        self._rows.settle_drafts(rows, computed, totals, decided.num_changes, granted[rows], growth[rows])
        self._count_ungranted(rows, np.maximum(self._rows.num_computed[rows] - num_expected, 0), decided.step)
        # with no draft verified it may be one that has stepped back by a token
        self._rows.doubt(rows[speculated[3] == 0], computed[speculated[3] == 0])
        self._speculation.observe(speculated)

    def _count_ungranted(self, rows: IntArray, num_tokens: IntArray, step: int) -> None:
        """Tokens that a step has computed beyond those it was granted, because it went on."""
        num_each = int(num_tokens.max(initial=0))
        if num_each:
            self._recorder.went_on(step, num_each)
            self._lifecycle.queues.shares.charge(self._rows.tenant[rows], num_tokens)

    # ------------------------------------------------------------------------------------------ failures

    def _end_failed(self, output: StepOutput, decided: StepInFlight) -> None:
        """A failed row ends its request. What the row has cached may be what failed it, or was never written, so it is
        forgotten."""
        failures = output.failures
        failed = [self._running.sequence_at(row) for row in failures if self._is_as_decided(row, decided)]
        if len(failed) < len(failures) or not all(map(self._has_what_it_was_to_write, failed)):
            # Which blocks they were to write is not known any more.
            self._manager.reset_prefix_cache()
        # before any of them ends, because several may be of one request
        for sequence in failed:
            self._manager.forget(sequence)
        for sequence in failed:
            if sequence.request.request_id in self._lifecycle.requests:
                self._lifecycle.num_failed += 1
                sequence.request.is_refused = sequence.row in output.blamed
                self._lifecycle.end_request(sequence.request, "error", failures[sequence.row])

    def _has_what_it_was_to_write(self, sequence: Sequence) -> bool:
        """Not if it has given way since, or if a later step was decided when a window had passed it or its state was
        left behind."""
        return sequence.is_begun and not (self._manager.may_miss_siblings and self.in_flight)

    # ------------------------------------------------------------------------------------------ vectors

    def _end_pooled(self, vectors: dict[int, bytes], decided: StepInFlight) -> None:
        """What came of a row that has ended meanwhile, or that somebody else has, nobody waits for."""
        pooled = [(row, values) for row, values in vectors.items() if self._is_as_decided(row, decided)]
        for row, values in pooled:
            sequence = self._running.sequence_at(row)
            self._lifecycle.end_with_vector(sequence, values)

    # ------------------------------------------------------------------------------------------ log-probabilities

    def _logprobs_of(
        self, by_row: dict[int, list[TokenLogprobs]], decided: StepInFlight, rows: IntArray
    ) -> list[SequenceLogprobs]:
        """As many positions as tokens of that row are new."""
        if not by_row:
            return []
        counts = np.bincount(rows, minlength=self._rows.num_rows)
        known = {row: entries for row, entries in by_row.items() if 0 <= row < len(counts)}
        return self._by_sequence({row: entries[: counts[row]] for row, entries in known.items()}, decided)

    def _by_sequence(self, by_row: dict[int, list[TokenLogprobs]], decided: StepInFlight) -> list[SequenceLogprobs]:
        return [
            SequenceLogprobs(int(self._rows.sequence_id[row]), entries)
            for row, entries in by_row.items()
            if self._is_as_decided(row, decided)
        ]


def _numbers_in_runs(rows: IntArray) -> IntArray:
    """0, 1, 2 ... within each run of equal rows."""
    if not len(rows):
        return NO_INTS
    index = np.arange(len(rows))
    is_first: npt.NDArray[np.bool_] = np.concatenate([[True], rows[1:] != rows[:-1]])
    numbers: IntArray = index - np.maximum.accumulate(np.where(is_first, index, 0))
    return numbers
