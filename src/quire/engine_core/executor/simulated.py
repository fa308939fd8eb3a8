"""An executor without a model, on a virtual clock: the engine core is run, checked and timed in milliseconds.

Runs the SchedulerOutputs that a worker would run, on a cache that checks what is read from it (checking_cache.py), and
answers with tokens that follow from the prefix alone (checking_model.py). What a step would have taken is added to a
clock. See docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.engine_core.executor.checking_cache import CheckingCache
from quire.engine_core.executor.checking_model import log_probabilities, next_tokens
from quire.engine_core.executor.simulated_rows import SimulatedRows
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.errors import UserError
from quire.messages import Candidates, IntArray, SchedulerOutput, StepOutput, WorkerCapacity

_EVERYTHING = 1 << 62


@dataclass(frozen=True)
class StepCosts:
    """What a step takes, in seconds: a sum over what it does. Measured ones come from `quire bench` or a GPU's data."""

    seconds_per_step: float = 1e-3
    # each token that is computed
    seconds_per_token: float = 1e-5
    # each token of context that a row reads, once a row and step
    seconds_per_context_token: float = 0.0
    # each block that goes out to swap space or comes back
    seconds_per_swapped_block: float = 1e-4
    seconds_per_copied_block: float = 1e-5


class SimulatedClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


@dataclass
class SimulatedWork:
    """What was done so far."""

    num_steps: int = 0
    num_tokens: int = 0
    num_context_tokens: int = 0
    num_forks: int = 0
    num_copied_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0


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
        costs: StepCosts | None = None,
        clock: SimulatedClock | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.clock = clock or SimulatedClock()
        self.costs = costs or StepCosts()
        self.cache = CheckingCache(num_blocks, num_host_blocks, block_size)
        self.work = SimulatedWork()
        # rows that fail the next time they compute, with the reason
        self.failing_rows: dict[int, str] = {}
        # called with each step's decision before anything of it is applied
        self.observers: list[Callable[[SchedulerOutput], None]] = []
        self._rows = SimulatedRows(len(groups), block_size)
        # by group: how many tokens back from a new one, itself included, attention reads
        self._reach = np.array([group.sliding_window or _EVERYTHING for group in groups])
        self._has_windows = any(group.sliding_window for group in groups)
        # the layers of a group write something of their own: a block of one group is of no use to another
        self._marks = np.arange(len(groups), dtype=np.uint64)[:, None] << np.uint64(56)

    # ------------------------------------------------------------------------------------------ as any executor

    def execute(self, output: SchedulerOutput) -> Future[StepOutput]:
        for observe in self.observers:
            observe(output)
        self._apply(output)
        num_context_tokens = self._compute(output.rows, output.num_tokens)
        self._count(output, num_context_tokens)
        future: Future[StepOutput] = Future()
        future.set_result(self._answer(output.step, output.rows))
        return future

    def measure_capacity(self) -> WorkerCapacity:
        return WorkerCapacity(
            layers=[], available_bytes=0, explanation="simulated", seconds_per_token=self.costs.seconds_per_token
        )

    def initialize_cache(self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0) -> None:
        raise AssertionError("the simulated executor is built with its cache")

    def control(self, name: str, args: dict[str, Any]) -> Any:
        if name == "measure_swap":
            return self.costs.seconds_per_swapped_block
        raise UserError(f"control {name!r}: a simulated worker has no such operation.")

    def shutdown(self) -> None:
        """There is nothing to give back."""

    def poison(self, blocks: Iterable[int], host_blocks: Iterable[int] = ()) -> None:
        """For harnesses: these blocks are free, so whoever reads them from now on is wrong."""
        self.cache.poison(blocks, host_blocks)

    # ------------------------------------------------------------------------------------------ one step

    def _apply(self, output: SchedulerOutput) -> None:
        rows = self._rows
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
        self.cache.move(output.swapped_out, output.swapped_in, output.block_copies)

    def _compute(self, rows: IntArray, num_tokens: IntArray) -> int:
        """All layers write before they read, so all rows of a step do. Returns the tokens of context that were read."""
        if not len(rows):
            return 0
        state = self._rows
        starts = state.num_computed[rows]
        ends = starts + num_tokens
        assert state.is_used[rows].all(), "a row computes, but nobody is there"
        assert len(set(rows.tolist())) == len(rows), "a row is granted tokens twice"
        assert num_tokens.min() > 0, "a row is granted nothing"
        assert (ends <= state.num_total[rows]).all(), "granted more tokens than there are"
        assert ends.max() <= state.slots.shape[2], "a token is computed at a position that has no block"
        which, positions = _spans(rows, starts, num_tokens)
        self.cache.write(state.slots[:, which, positions], state.hashes[which, positions + 1] ^ self._marks)
        self._check(rows, starts, ends)
        state.num_computed[rows] = ends
        return int(ends.sum())

    def _check(self, rows: IntArray, starts: IntArray, ends: IntArray) -> None:
        """Every cell that attention reads must hold the prefix that its position has in this row."""
        longest = int(ends.max())
        positions = np.arange(longest)
        found = self.cache.read(self._rows.slots[:, rows, :longest])
        is_wrong = found != self._rows.hashes[rows, 1 : longest + 1] ^ self._marks[:, :, None]
        is_wrong &= positions < ends[:, None]
        if self._has_windows:
            is_wrong &= positions > (starts - self._reach[:, None])[:, :, None]
        if is_wrong.any():
            group, position_in_step, _ = np.argwhere(is_wrong)[0]
            wrong = np.flatnonzero(is_wrong[group, position_in_step]).tolist()
            raise AssertionError(f"row {rows[position_in_step]}, group {group}: wrong content at positions {wrong}")

    def _answer(self, step: int, rows: IntArray) -> StepOutput:
        """A token, or candidates, of each row that has computed all it has."""
        state = self._rows
        failures = {int(row): self.failing_rows.pop(row) for row in rows.tolist() if row in self.failing_rows}
        is_done = (state.num_computed[rows] == state.num_total[rows]) & state.is_final[rows]
        if failures:
            is_done &= ~np.isin(rows, list(failures))
        is_watched = state.num_candidates[rows] > 0
        sampled = rows[is_done & ~is_watched]
        token_ids = np.zeros(0, dtype=np.int64)
        if len(sampled):
            hashes = state.last_hashes(sampled)
            token_ids = next_tokens(hashes, state.seeds[sampled], state.is_greedy[sampled], self.vocab_size)
            state.append(sampled, token_ids)
        candidates = self._candidates(rows[is_done & is_watched]) if is_watched.any() else {}
        return StepOutput(step=step, rows=sampled, token_ids=token_ids, candidates=candidates, failures=failures)

    def _candidates(self, rows: IntArray) -> dict[int, Candidates]:
        state = self._rows
        logprobs = log_probabilities(state.last_hashes(rows), state.temperatures[rows], self.vocab_size)
        best_first = np.argsort(-logprobs, axis=1, kind="stable")
        found = {}
        for position, row in enumerate(rows.tolist()):
            token_ids = best_first[position, : state.num_candidates[row]]
            found[row] = Candidates(token_ids.tolist(), logprobs[position, token_ids].tolist())
        return found

    def _count(self, output: SchedulerOutput, num_context_tokens: int) -> None:
        work, costs = self.work, self.costs
        num_tokens, num_copied = output.num_scheduled_tokens, output.block_copies.shape[1]
        num_out, num_in = output.swapped_out.shape[1], output.swapped_in.shape[1]
        work.num_steps += 1
        work.num_tokens += num_tokens
        work.num_context_tokens += num_context_tokens
        work.num_forks += len(output.forked)
        work.num_copied_blocks += num_copied
        work.num_swapped_out_blocks += num_out
        work.num_swapped_in_blocks += num_in
        self.clock.advance(
            costs.seconds_per_step
            + costs.seconds_per_token * num_tokens
            + costs.seconds_per_context_token * num_context_tokens
            + costs.seconds_per_swapped_block * (num_out + num_in)
            + costs.seconds_per_copied_block * num_copied
        )


def _spans(rows: IntArray, starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Every position of every row, one after the other: (row, position) columns."""
    if lengths.max() == 1:
        return rows, starts
    before = np.cumsum(lengths) - lengths
    return np.repeat(rows, lengths), np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
