"""An executor without a model, on a virtual clock: the engine core is run, checked and timed in milliseconds.

Runs the SchedulerOutputs that a worker would run, on a cache that checks what is read from it (checking_cache.py), and
answers with tokens that follow from the prefix alone (checking_model.py). What a step would have taken is added to a
clock. See docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine_core.executor.modelled import StepWork
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.errors import UserError
from quire.kv_connectors.connector import STEP_DATA, NoWorkerHalf, StepTransfers, WorkerHalf
from quire.messages import NUM_DRAFTS, Candidates, IntArray, SchedulerOutput, StepOutput, WorkerCapacity
from quire.simulation.costs.linear import LinearCosts
from quire.testing.simulator.bursts import SimulatedBursts
from quire.testing.simulator.checking_cache import CheckingCache
from quire.testing.simulator.checking_model import log_probabilities, next_tokens, pooling_vectors
from quire.testing.simulator.connector import simulated_layout
from quire.testing.simulator.drafts import SimulatedDrafts, propose, verify
from quire.testing.simulator.lateness import SimulatedLateness
from quire.testing.simulator.rows import SimulatedRows
from quire.testing.simulator.states import SimulatedStates
from quire.testing.simulator.work import SimulatedAnswer, SimulatedClock, SimulatedWork

__all__ = ["SimulatedClock", "SimulatedDrafts", "SimulatedExecutor"]

_EVERYTHING = 1 << 62
# Why a row failed that found, in this step or the one before, what a failed one was to write. Workers say so, too.
READS_HOLE = "it reads what a row that failed did not write"
Flags = npt.NDArray[np.bool_]


class SimulatedExecutor:
    """Checks every read, answers at once, and moves the clock."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int,
        block_size: int,
        vocab_size: int = 50,
        *,
        num_host_blocks: int = 0,
        costs: LinearCosts | None = None,
        clock: SimulatedClock | None = None,
        drafts: SimulatedDrafts | None = None,
        connector: WorkerHalf | None = None,
    ) -> None:
        """The connector moves the contents of the checking caches (connector.py)."""
        self.vocab_size = vocab_size
        self.clock = clock or SimulatedClock()
        self.costs = costs or LinearCosts()
        self.cache = CheckingCache(num_blocks, num_host_blocks, block_size)
        self.drafts = drafts
        # the layers of the model, and those of a draft model in the same blocks
        self._caches = [self.cache]
        if drafts is not None and drafts.has_cache:
            self._caches.append(CheckingCache(num_blocks, num_host_blocks, block_size))
        self.connector = connector or NoWorkerHalf()
        self.connector.open(simulated_layout(block_size), self._caches)
        self.work = SimulatedWork()
        # rows that fail the next time they compute, with the reason
        self.failing_rows: dict[int, str] = {}
        # called with each step's decision before anything of it is applied
        self.observers: list[Callable[[SchedulerOutput], None]] = []
        # called with rows, and where each begins and ends, when they are about to write
        self.write_observers: list[Callable[[IntArray, IntArray, IntArray], None]] = []
        # when the steps that were handed in are done
        self._busy_until = 0.0
        num_state_blocks = groups[-1].num_state_blocks
        self.states = SimulatedStates(num_blocks, num_host_blocks, num_state_blocks)
        groups = [group for group in groups if not group.num_state_blocks]
        self.rows = SimulatedRows(len(groups), block_size, num_state_blocks)
        self.lateness = SimulatedLateness(self.rows)
        self.bursts = SimulatedBursts(self.rows, block_size)
        # by group: how many tokens back from a new one, itself included, attention reads
        self._reach = np.array([[group.sliding_window or _EVERYTHING] for group in groups])
        self._is_chunked = np.array([[group.is_chunked] for group in groups])
        self._has_windows = any(group.sliding_window for group in groups)
        # the layers of a group write something of their own: a block of one group is of no use to another
        self._marks = np.arange(len(groups), dtype=np.uint64)[:, None] << np.uint64(56)
        self._marks_of_cells = self._marks[:, :, None]

    # ------------------------------------------------------------------------------------------ as any executor

    def execute(self, output: SchedulerOutput) -> Future[StepOutput]:
        for observe in self.observers:
            observe(output)
        self._apply(output)
        for cache in self._caches:
            cache.step = output.step
        transfers: StepTransfers | None = output.step_data.get(STEP_DATA)
        if transfers is not None:
            self.connector.load(transfers.loads)
        rows, num_tokens = self._computable(output.rows, output.num_tokens)
        is_out = self.lateness.leave_out(output.step, rows, self._fails(rows))
        rows, num_tokens = rows[~is_out], num_tokens[~is_out]
        num_context_tokens, num_pairs = self._compute(rows, num_tokens)
        rows = self.lateness.without_late(output.step, rows, self._fails(rows))
        asked = output.step_data.get(NUM_DRAFTS)
        if asked is None and (self.drafts is None or not self._have_drafts(rows)):
            answer = self._answer(output.step, rows)
            if output.most_tokens > 1 and self.bursts.share and len(answer.rows) == len(output.rows):
                num_context_tokens, num_pairs = self._go_on(answer, num_context_tokens, num_pairs)
        else:
            answer = self._answer_with_drafts(output, rows, asked)
        answer.speculated = np.concatenate([answer.speculated, self.lateness.report()], axis=1)
        if transfers is not None:
            self.connector.store([store for store in transfers.stores if not self.rows.has_failed[store.row]])
            if transfers.spills:
                doubtful = set(self.rows.blocks_of(np.flatnonzero(self.rows.has_failed)))
                self.connector.spill([spill for spill in transfers.spills if spill.block not in doubtful])
        num_computed = max(sum(num_tokens.tolist()), len(answer.rows))
        seconds = self._count(output, num_computed, num_context_tokens, num_pairs)
        self._busy_until = max(self._busy_until, self.clock.now()) + seconds
        return SimulatedAnswer(answer, self.clock, self._busy_until)

    def measure_capacity(self) -> WorkerCapacity:
        return WorkerCapacity(
            layers=[], available_bytes=0, explanation="simulated", seconds_per_token=self.costs.per_token
        )

    def initialize_cache(self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0) -> None:
        raise AssertionError("the simulated executor is built with its cache")

    def run_ahead(self) -> None:
        """It always does: a step takes its time when its result is asked for."""

    def control(self, name: str, args: dict[str, Any]) -> Any:
        if name == "measure_swap":
            return self.costs.per_swapped_block
        if name == "watch_arrivals":
            return None  # a step is over before anything could come
        raise UserError(f"control {name!r}: a simulated worker has no such operation.")

    def loss_descriptors(self) -> tuple[int, ...]:
        return ()

    def check_workers(self) -> None: ...

    def shutdown(self) -> None:
        """There is nothing to give back."""

    def poison(self, blocks: Iterable[int], host_blocks: Iterable[int] = ()) -> None:
        """For harnesses: these blocks are free, so whoever reads them from now on is wrong."""
        for cache in self._caches:
            cache.poison(blocks, host_blocks)
        self.states.poison(blocks, host_blocks)

    # ------------------------------------------------------------------------------------------ one step

    def _apply(self, output: SchedulerOutput) -> None:
        rows = self.rows
        for fork in output.forked:
            rows.fork(fork)
        for row in output.released:
            rows.release(row)
        for admitted in output.admitted:
            rows.admit(admitted)
        for row, num_computed in output.progress:
            rows.set_progress(row, num_computed)
        for appended in output.appended:
            rows.append_chosen(appended)
        rows.set_blocks(output.block_writes)
        if output.swapped_out.size or output.swapped_in.size or output.block_copies.size:
            for cache in self._caches:
                cache.move(output.swapped_out, output.swapped_in, output.block_copies)
            self.states.move(output.swapped_out, output.swapped_in, output.block_copies)

    def _computable(self, rows: IntArray, granted: IntArray) -> tuple[IntArray, IntArray]:
        """Rows and how many tokens each computes: fewer than granted where drafts were fewer than promised."""
        if not len(rows):
            return rows, granted
        state = self.rows
        assert np.count_nonzero(state.is_used[rows]) == len(rows), "a row computes, but nobody is there"
        assert len(set(rows.tolist())) == len(rows), "a row is granted tokens twice"
        assert min(granted.tolist()) > 0, "a row is granted nothing"
        there = state.num_total[rows] - state.num_computed[rows]
        is_short = granted > there
        if not np.count_nonzero(is_short):
            return rows, granted
        is_guessed = self.drafts is not None or self.lateness.share > 0
        is_uncertain = state.has_failed[rows] | (state.num_candidates[rows] == 0) & is_guessed
        assert not (is_short & ~is_uncertain).any(), "granted more tokens than there are"
        granted = np.minimum(granted, there)
        return rows[granted > 0], granted[granted > 0]

    def _compute(self, rows: IntArray, num_tokens: IntArray) -> tuple[int, int]:
        """All layers write before they read, so all rows of a step do. Returns the tokens of context that were read,
        and the pairs of a query and a key, where each token sees all before it and itself."""
        if not len(rows):
            return 0, 0
        state = self.rows
        starts = state.num_computed[rows]
        ends = starts + num_tokens
        for observe in self.write_observers:
            observe(rows, starts, ends)
        fails = self._fails(rows)
        if len(state.slots):  # else there are only states
            fails = self._write_and_read(rows, starts, num_tokens, fails)
        state.computes_again[rows] = starts < state.num_written[rows]
        self.states.absorb(state, rows, ends, fails)
        state.num_computed[rows] = ends
        state.see(rows, starts, ends)
        return sum(ends.tolist()), int((starts + ends + 1) @ num_tokens) // 2

    def _write_and_read(self, rows: IntArray, starts: IntArray, num_tokens: IntArray, fails: Flags) -> Flags:
        """Keys and values. Returns who fails, for some may read what others that fail have not written."""
        state, tables = self.rows, self.rows.slots
        ends = starts + num_tokens
        assert max(ends.tolist()) <= tables.shape[2], "a token is computed at a position that has no block"
        # what a late row computes again is there, and others may hold it; so are drafts that were right
        is_new = ~state.is_late[rows]
        which, positions = _spans(rows[is_new], starts[is_new], num_tokens[is_new])
        is_missing = positions >= state.num_written[which]
        which, positions = which[is_missing], positions[is_missing]
        slots, hashes = tables[:, which, positions], state.hashes[which, positions + 1] ^ self._marks
        for cache in self._caches:
            cache.write(slots, hashes)
        while True:
            for cache in self._caches if np.count_nonzero(fails) else ():
                cache.leave_holes(slots[:, np.isin(which, rows[fails])])
            readers = self._check(rows, starts, ends, fails)
            if readers is None:
                return fails
            self.failing_rows.update(dict.fromkeys(rows[readers].tolist(), READS_HOLE))
            fails = fails | readers

    def _fails(self, rows: IntArray) -> Flags:
        """Those that write nothing: they fail now, or have failed and the core does not know yet."""
        fails: Flags = self.rows.has_failed[rows]
        return fails | np.isin(rows, list(self.failing_rows)) if self.failing_rows else fails

    def _check(self, rows: IntArray, starts: IntArray, ends: IntArray, fails: Flags) -> Flags | None:
        """Every cell that attention reads must hold the prefix that its position has in this row.

        Returns who finds nothing wrong but fresh holes, if anybody does: a worker notices that for so long, and no
        longer.
        """
        longest = max(ends.tolist())
        positions = np.arange(longest)
        slots, expected = self.rows.slots[:, rows, :longest], self.rows.hashes[rows, 1 : longest + 1]
        # those that fail read nothing
        is_read = positions < (ends * ~fails)[:, None]
        if self._has_windows:
            first = np.where(self._is_chunked, starts - starts % self._reach, starts - self._reach + 1)
            is_read = is_read & (positions >= first[:, :, None])
        expected = expected ^ self._marks_of_cells
        reads_hole: Flags | None = None
        for cache in self._caches:
            cells = cache.read(slots)
            is_wrong = cells != expected
            is_wrong &= is_read
            if not np.count_nonzero(is_wrong):
                continue
            is_hole = is_wrong & cache.are_fresh_holes(cells)
            if (is_wrong & ~is_hole).any():
                group, position_in_step, _ = np.argwhere(is_wrong & ~is_hole)[0]
                wrong = np.flatnonzero(is_wrong[group, position_in_step]).tolist()
                raise AssertionError(f"row {rows[position_in_step]}, group {group}: wrong content at positions {wrong}")
            readers: Flags = is_hole.any(axis=(0, 2))
            reads_hole = readers if reads_hole is None else reads_hole | readers
        return reads_hole

    def _answer(self, step: int, rows: IntArray) -> StepOutput:
        """A token, or candidates, of each row that has computed all it has."""
        state = self.rows
        failures = self._failures(rows)
        is_done = (state.num_computed[rows] == state.num_total[rows]) & state.is_final[rows]
        if failures:
            is_done &= ~state.has_failed[rows]
        vectors, is_done = self._vectors(rows, is_done)
        candidates: dict[int, Candidates] = {}
        is_watched = state.num_candidates[rows] > 0
        if np.count_nonzero(is_watched):
            candidates = self._candidates(rows[is_done & is_watched])
            is_done &= ~is_watched
        sampled = rows[is_done]
        return StepOutput(
            step=step,
            rows=sampled,
            token_ids=self._sample(sampled) if len(sampled) else np.zeros(0, dtype=np.int64),
            candidates=candidates,
            vectors=vectors,
            failures=failures,
        )

    def _sample(self, rows: IntArray) -> IntArray:
        state = self.rows
        hashes = state.last_hashes(rows)
        token_ids: IntArray = next_tokens(hashes, state.seeds[rows], state.is_greedy[rows], self.vocab_size)
        state.append(rows, token_ids)
        return token_ids

    def _go_on(self, answer: StepOutput, num_context_tokens: int, num_pairs: int) -> tuple[int, int]:
        """All rows of a step have got a token, and may get more."""
        rows = answer.rows
        tokens = [answer.token_ids]
        for _ in range(self.bursts.num_more(answer.step)):
            if not self.bursts.may_go_on(rows):
                break
            more_context, more_pairs = self._compute(rows, np.ones_like(rows))
            num_context_tokens += more_context
            num_pairs += more_pairs
            tokens.append(self._sample(rows))
        if len(tokens) > 1:
            self.bursts.num_steps += 1
            state = self.rows
            more = np.full_like(rows, len(tokens) - 1)
            answer.rows = rows.repeat(len(tokens))
            answer.token_ids = np.stack(tokens, axis=1).reshape(-1)
            answer.speculated = np.stack([rows, state.num_computed[rows], state.num_total[rows], more, more])
        return num_context_tokens, num_pairs

    def _have_drafts(self, rows: IntArray) -> bool:
        """Or have had some, which they compute once more."""
        return bool(np.count_nonzero(self.rows.num_drafts[rows]) or np.count_nonzero(self.rows.computes_again[rows]))

    def _answer_with_drafts(self, output: SchedulerOutput, rows: IntArray, asked: IntArray | None) -> StepOutput:
        """The same where rows have drafts, or are to have some."""
        assert self.drafts is not None, "drafts are asked for, but there is no proposer"
        if not len(rows):
            return StepOutput(step=output.step)
        state = self.rows
        failures = self._failures(rows)
        is_watched = state.num_candidates[rows] > 0
        may_sample = state.is_final[rows] & ~state.has_failed[rows]
        is_done = (state.num_computed[rows] == state.num_total[rows]) & may_sample
        vectors, is_done = self._vectors(rows, is_done)
        may_sample &= ~state.is_pooled[rows]
        num_before = state.num_drafts[rows]
        first_drafts, ends = state.num_total[rows] - num_before, state.num_computed[rows]
        found = verify(state, rows, may_sample & ~is_watched, self.vocab_size)
        wanted = np.zeros(len(rows), dtype=np.int64)
        if asked is not None:
            if len(rows) < len(output.rows):  # some have fewer tokens than they were granted, and compute none
                asked = asked[np.isin(output.rows, rows)]
            wanted = asked * found.samples
            is_to_propose = wanted > 0
            self._propose(rows[is_to_propose], wanted[is_to_propose])
        if self.states.num_state_blocks:
            # drafts that were right are computed once more, because no state has taken them in
            had_drafts = (num_before > 0) & ~state.has_failed[rows]
            again = rows[had_drafts]
            state.num_written[again] = np.minimum(ends, first_drafts + found.num_accepted)[had_drafts]
            state.num_computed[again] = state.num_absorbed[again]
        if np.count_nonzero(num_before):
            self._count_drafts(found.num_looked_at, found.num_accepted, num_before)
        # one that computes drafts once more may have been expected to sample, if it was granted tokens ahead
        is_told = ((num_before > 0) | (wanted > 0) | state.computes_again[rows]) & ~state.has_failed[rows]
        told = rows[is_told]
        return StepOutput(
            step=output.step,
            rows=rows.repeat(found.num_emitted),
            token_ids=found.token_ids,
            candidates=self._candidates(rows[is_done & is_watched]) if np.count_nonzero(is_watched) else {},
            vectors=vectors,
            failures=failures,
            speculated=np.array(
                [
                    told,
                    state.num_computed[told],
                    state.num_total[told],
                    found.num_looked_at[is_told],
                    found.num_accepted[is_told],
                ]
            ),
        )

    def _propose(self, rows: IntArray, wanted: IntArray) -> None:
        if not len(rows):
            return
        state = self.rows
        assert self.drafts is not None
        starts = state.num_computed[rows]
        self.work.num_drafted_tokens += int(propose(state, rows, wanted, self.drafts, self.vocab_size).sum())
        if self.drafts.has_cache and len(state.slots):
            # each token but the last one that is proposed is an input of the draft model, the sampled one included
            which, positions = _spans(rows, starts, wanted)
            assert max(positions.tolist()) < state.slots.shape[2], "a draft has no block"
            slots = state.slots[:, which, positions]
            assert slots.min() >= 0, "a draft has no block"
            is_written = positions < state.num_total[which] - 1  # there may be fewer than were asked for
            if np.count_nonzero(is_written):
                hashes = state.hashes[which[is_written], positions[is_written] + 1]
                self._caches[1].write(slots[:, is_written], hashes ^ self._marks)

    def _failures(self, rows: IntArray) -> dict[int, str]:
        if not self.failing_rows:
            return {}
        failures = {row: self.failing_rows.pop(row) for row in rows.tolist() if row in self.failing_rows}
        self.rows.has_failed[list(failures)] = True
        return failures

    def _vectors(self, rows: IntArray, is_done: Flags) -> tuple[dict[int, bytes], Flags]:
        """What follows from the prefix alone, for rows that pool; and who is left to sample."""
        state = self.rows
        is_pooled = state.is_pooled[rows]
        if not np.count_nonzero(is_pooled):
            return {}, is_done
        pooled = rows[is_done & is_pooled]
        vectors = zip(pooled.tolist(), pooling_vectors(state.last_hashes(pooled)), strict=True)
        return dict(vectors), is_done & ~is_pooled

    def _candidates(self, rows: IntArray) -> dict[int, Candidates]:
        state = self.rows
        logprobs = log_probabilities(state.last_hashes(rows), state.temperatures[rows], self.vocab_size)
        best_first = np.argsort(-logprobs, axis=1, kind="stable")
        found = {}
        for position, row in enumerate(rows.tolist()):
            token_ids = best_first[position, : state.num_candidates[row]]
            found[row] = Candidates(token_ids.tolist(), logprobs[position, token_ids].tolist())
        return found

    def _count(self, output: SchedulerOutput, num_tokens: int, num_context_tokens: int, num_pairs: int) -> float:
        """Adds up what the step did; returns what it takes."""
        work = self.work
        num_copied = int(output.block_copies.shape[1])
        num_out, num_in = int(output.swapped_out.shape[1]), int(output.swapped_in.shape[1])
        work.num_steps += 1
        work.num_tokens += num_tokens
        work.num_context_tokens += num_context_tokens
        work.num_forks += len(output.forked)
        work.num_copied_blocks += num_copied
        work.num_swapped_out_blocks += num_out
        work.num_swapped_in_blocks += num_in
        seconds = self.costs.seconds(
            StepWork(
                num_tokens=num_tokens,
                context_tokens=num_context_tokens,
                attention_pairs=num_pairs,
                num_copied_blocks=num_copied,
                num_swapped_blocks=num_out + num_in,
            )
        )
        return float(seconds)

    def _count_drafts(self, num_looked_at: IntArray, num_accepted: IntArray, num_before: IntArray) -> None:
        work = self.work
        accepted = sum(num_accepted.tolist())
        work.num_accepted_tokens += accepted
        work.num_rejected_tokens += sum(num_looked_at.tolist()) - accepted
        is_partial = (num_looked_at > 0) & (num_looked_at == num_accepted) & (num_looked_at < num_before)
        work.num_partial_verifications += int(np.count_nonzero(is_partial))


def _spans(rows: IntArray, starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Every position of every row, one after the other: (row, position) columns."""
    if max(lengths.tolist(), default=1) == 1:
        return rows, starts
    until = lengths.cumsum()
    return rows.repeat(lengths), np.arange(int(until[-1])) + (starts - until + lengths).repeat(lengths)
