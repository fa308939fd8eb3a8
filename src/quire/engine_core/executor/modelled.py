"""An executor without a model, on a virtual clock: it answers at once and keeps the time that a worker would take.

What the core decides it decides for real: who runs, who forks, who gives way and how, what the prefix cache has. Only
what a worker computes is made up: a token is a number that follows from the sequence and the place, and a draft is
right as often as is said. Contents of blocks are not kept; the checking executor of the tests does that
(testing/simulator). What a step takes is said by a cost model (simulation/costs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.config import WorkerConfig
from quire.engine_core.executor.executor import RESIDENT_MEMORY, STEP_TIMES, PendingStep
from quire.errors import UserError
from quire.messages import (
    NUM_DRAFTS,
    Candidates,
    EngineRequest,
    IntArray,
    LayerSpec,
    SchedulerOutput,
    StepOutput,
    WorkerCapacity,
)

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
# of one step, or of several that differ in nothing else
Amount: TypeAlias = float | Floats

# neighbouring places must have nothing in common
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_AGAIN = np.uint64(0xBF58476D1CE4E5B9)
_PARTS = 1 << 16


def check_laid_over(config: WorkerConfig) -> None:
    """OptionError: what a worker would refuse of hf_overrides. It takes a second, as a worker's code does."""
    if config.added_config_keys:
        from quire.worker import model_loader

        model_loader.check_laid_over(config)


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, time: float) -> None:
        """Time never goes back."""
        self._now = max(self._now, time)


@dataclass(slots=True)
class StepWork:
    """What a step does, in amounts that cost time. All of them are of the whole model, whoever shares it."""

    num_rows: int = 0
    # computed, and those of them whose logits are looked at
    num_tokens: int = 0
    num_sampled: int = 0
    # tokens of context that attention reads, once a row, in a layer that sees all of them
    context_tokens: Amount = 0.0
    # the same in bytes, over all layers; windows are counted row by row
    context_bytes: Amount = 0.0
    # pairs of a query and a key, over all layers
    attention_pairs: Amount = 0.0
    # blocks: copied on the device, and moved to the host or back
    num_copied_blocks: int = 0
    num_swapped_blocks: int = 0
    # passes of a proposer, and the drafts that come of them
    num_draft_passes: int = 0
    num_drafts: int = 0


class RoomInLeap(Protocol):
    """What the core says of those who come while steps are made together."""

    # of the leap, and tokens of a step
    num_steps: int
    num_tokens: int

    def take(self, requests: Sequence[EngineRequest], num_running: int) -> list[int]:
        """How many tokens each of these gets, who come together; nothing: one of them must wait for a decision. A
        prompt that is longer than a step has room for takes two."""


@dataclass(frozen=True, slots=True)
class Join:
    """Who came at that time, begins in a step, and gets a token in so many of these steps from that or the next one
    on."""

    begins: int
    step: int
    request: EngineRequest
    at: float
    num_steps: int


class CostModel(Protocol):
    """How long a step takes. Of amounts that are columns the answer is a column; each number is made by the same
    operations in the same order, so that it does not matter whether steps are priced one by one."""

    def seconds(self, work: StepWork) -> Amount: ...


@dataclass(frozen=True)
class DraftQuality:
    """Of a proposer that is not run: the share of its tokens that are right."""

    acceptance: float = 0.7


def _time_of(arrivals: Sequence[tuple[float, EngineRequest]], number: int) -> float:
    return arrivals[number][0] if number < len(arrivals) else math.inf


def _earlier(arrivals: Sequence[tuple[float, EngineRequest]], first: int, now: float) -> list[EngineRequest]:
    """Those from the first on who have come by now."""
    last = first
    while last < len(arrivals) and arrivals[last][0] <= now:
        last += 1
    return [request for _, request in arrivals[first:last]]


class ModelledStep:
    """What a step brings, known at once; whoever waits for it lets the time pass that it takes."""

    def __init__(self, output: StepOutput, clock: VirtualClock, done_at: float) -> None:
        self._output = output
        self._clock = clock
        self.done_at = done_at

    def result(self) -> StepOutput:
        self._clock.wait_until(self.done_at)
        return self._output


class ModelledExecutor:
    """Keeps of each row the two numbers and how it samples; everything else is the core's."""

    def __init__(
        self,
        capacity: WorkerCapacity,
        costs: CostModel,
        *,
        clock: VirtualClock | None = None,
        num_stages: int = 1,
        vocab_size: int = 32_000,
        drafts: DraftQuality | None = None,
        control: dict[str, Any] | None = None,
        answers: Callable[[int], StepOutput] | None = None,
    ) -> None:
        """`capacity`: what a worker would have measured. `num_stages`: of a pipeline, which begins a step while others
        are under way. `control`: answers to management operations, such as measure_swap. `answers`: what a worker said
        to the step of that number, in the place of what is made up."""
        self.capacity = capacity
        self.costs = costs
        self.clock = clock or VirtualClock()
        # how much likelier a candidate is than the next one: with more of it, beams come from fewer parents
        self.confidence = 1.0
        # called with what was decided, what it comes to and when it is done
        self.on_step: Callable[[SchedulerOutput, StepWork, float], None] | None = None
        self.num_steps = 0
        self._num_stages = num_stages
        self._vocab_size = vocab_size
        self._drafts = drafts or DraftQuality()
        self._control = {RESIDENT_MEMORY: {}, STEP_TIMES: {}, **(control or {})}
        self._answers = answers
        self._attention = _kinds_of(capacity.layers)
        # when the first stage is free again, and when the last step that was handed in is done
        self._free_at = 0.0
        self._last_done_at = 0.0
        self._rows = _Rows()

    # ------------------------------------------------------------------------------------------ as any executor

    def measure_capacity(self) -> WorkerCapacity:
        return self.capacity

    def initialize_cache(self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0) -> None:
        """There is none."""

    def run_ahead(self) -> None:
        """It always does: a step is under way until somebody waits for it."""

    def execute(self, output: SchedulerOutput) -> PendingStep:
        rows = self._rows
        rows.apply(output)
        granted, num_tokens = rows.computable(output.rows, output.num_tokens)
        starts, ends = rows.compute(granted, num_tokens)
        answer, num_sampled, num_drafts, num_passes = self._answer(output, granted)
        work = self._work_of(output, starts, ends, num_sampled, num_passes, num_drafts)
        done_at = self._done_at(float(self.costs.seconds(work)))
        if self.on_step is not None:
            self.on_step(output, work, done_at)
        return ModelledStep(answer, self.clock, done_at)

    def begin_leap(self, decision: SchedulerOutput) -> StepWork:
        """Steps begin with this one, in which each row samples a token; `foresee` and `advance` make it."""
        rows = self._rows
        rows.apply(decision)
        return self._work_of(decision, *rows.compute(decision.rows, decision.num_tokens))

    def foresee(
        self,
        rows: IntArray,
        steps: IntArray,
        until: float,
        first_work: StepWork | None = None,
        arrivals: Sequence[tuple[float, EngineRequest]] = (),
        room: RoomInLeap | None = None,
    ) -> tuple[Floats, list[Join]]:
        """When the first of these steps begins and when each is done, if each row gets a token in so many of them, from
        the first on; none behind the first end that comes after that time. `first_work`: of the first step, if it
        computes more than a token a row. Nothing is in flight, and layers see all tokens.

        Those of the `arrivals` that have room join, each in the step that begins at its time or next. The steps end
        before the first that has none."""
        # (step behind the last one of a row, what the row would read in the first one)
        ends = sorted(zip(steps.tolist(), self._rows.num_total[rows].tolist(), strict=True))
        context = sum(read for _, read in ends)
        num_steps = ends[-1][0] if room is None else room.num_steps
        times = np.empty(num_steps + 1)
        times[0] = now = max(self._free_at, self.clock.now())
        # (first step, the one that brings a token, tokens) of those who join
        joined: list[tuple[int, int, int]] = []
        step = 0
        while step < num_steps:
            work = None if step else first_work
            next_at = _time_of(arrivals, len(joined))
            if next_at <= now:
                joining = _earlier(arrivals, len(joined), now)
                most = room.take(joining, len(ends)) if room is not None else []
                if room is None or not most:
                    break
                begins = step
                next_at = _time_of(arrivals, len(joined) + len(joining))
                pieces = [(0, len(request.prompt_token_ids)) for request in joining]
                num_left = room.num_tokens - len(ends)
                if sum(length for _, length in pieces) > num_left:
                    # of a prompt alone the rest is computed in the next step
                    work = self._work_of_joined(ends, context, step, [(0, num_left)], num_sampled=len(ends))
                    done_at = float(now + self.costs.seconds(work))
                    if step + 2 > num_steps or done_at >= min(until, next_at):
                        break
                    step += 1
                    times[step] = now = done_at
                    pieces = [(num_left, pieces[0][1])]
                    while ends and ends[0][0] == step:
                        context -= heappop(ends)[1]
                work = self._work_of_joined(ends, context, step, pieces, num_sampled=len(ends) + len(pieces))
                for (_, length), num_tokens in zip(pieces, most, strict=True):
                    joined.append((begins, step, num_tokens))
                    heappush(ends, (min(step + num_tokens, num_steps), length - step))
                    context += length - step
            if not ends:
                break
            first = step
            if work is not None:
                step += 1
                now = float(now + self.costs.seconds(work))
                times[step] = now
            else:
                step = min(ends[0][0], num_steps)
                piece = times[first : step + 1]
                piece[1:] = self.costs.seconds(self._work_of_context(len(ends), context, first, step))
                # one after the other, as a clock would add them
                np.add.accumulate(piece, out=piece)
                now = float(times[step])
                if arrivals and now >= min(until, next_at):
                    step = first + 1 + int(piece[1:].searchsorted(min(until, next_at)))
                    now = float(times[step])
            while ends and ends[0][0] == step:
                context -= heappop(ends)[1]
            if now >= until:
                break
        joins = [
            Join(begins, first, request, at, min(num_tokens, step - first))
            for (at, request), (begins, first, num_tokens) in zip(arrivals, joined, strict=False)
        ]
        return times[: step + 1], joins

    def _work_of_context(self, num_rows: int, context: int, first: int, last: int) -> StepWork:
        """Of these steps, counted from where so much context was read: each row reads a token more in each."""
        read = context + np.arange(float(first), float(last)) * num_rows
        num_bytes, pairs = self._attention.of_context(read, read)
        return StepWork(
            num_rows=num_rows,
            num_tokens=num_rows,
            num_sampled=num_rows,
            context_tokens=read,
            context_bytes=num_bytes,
            attention_pairs=pairs,
        )

    def _work_of_joined(
        self,
        ends: list[tuple[int, int]],
        context: int,
        step: int,
        pieces: list[tuple[int, int]],
        num_sampled: int,
    ) -> StepWork:
        """Of a step in which each of these rows gets a token, and these pieces of prompts are computed."""
        read = context + step * len(ends)
        seen = read + sum((first + last + 1) * (last - first) for first, last in pieces) // 2
        read += sum(last for _, last in pieces)
        num_bytes, pairs = self._attention.of_context(float(read), float(seen))
        return StepWork(
            num_rows=len(ends) + len(pieces),
            num_tokens=len(ends) + sum(last - first for first, last in pieces),
            num_sampled=num_sampled,
            context_tokens=float(read),
            context_bytes=num_bytes,
            attention_pairs=pairs,
        )

    def start(self, decision: SchedulerOutput, steps: IntArray) -> None:
        """Those of this decision join, and make so many of the steps that are made."""
        self._rows.apply(decision)
        self._rows.sample_many(decision.rows, steps)

    def advance(self, rows: IntArray, steps: IntArray, times: Floats) -> Callable[[], IntArray]:
        """Makes steps that were foreseen, from the first on. Says, when asked, what they sample, of one row after the
        other."""
        firsts = self._rows.sample_many(rows, steps)
        self.num_steps += len(times) - 1
        self._free_at = self._last_done_at = float(times[-1])
        self.clock.wait_until(self._free_at)
        return lambda: self._rows.tokens_from(rows, firsts, steps, self._vocab_size)

    def control(self, name: str, args: dict[str, Any]) -> Any:
        if name not in self._control:
            raise UserError(f"control {name!r}: a modelled worker has no such operation.")
        return self._control[name]

    def loss_descriptors(self) -> tuple[int, ...]:
        return ()

    def check_workers(self) -> None:
        """None can be lost."""

    def shutdown(self) -> None:
        """There is nothing to give back."""

    # ------------------------------------------------------------------------------------------ one step

    def _work_of(
        self,
        output: SchedulerOutput,
        starts: IntArray,
        ends: IntArray,
        num_sampled: int | None = None,
        num_passes: int = 0,
        num_drafts: int = 0,
    ) -> StepWork:
        """Of rows that compute from `starts` to `ends`; if nothing else is said, each samples."""
        reads, num_bytes, pairs = self._attention.reads(starts, ends)
        return StepWork(
            num_rows=len(starts),
            num_tokens=int((ends - starts).sum()),
            num_sampled=len(starts) if num_sampled is None else num_sampled,
            context_tokens=reads,
            context_bytes=num_bytes,
            attention_pairs=pairs,
            num_copied_blocks=int(output.block_copies.shape[1]),
            num_swapped_blocks=int(output.swapped_out.shape[1] + output.swapped_in.shape[1]),
            num_draft_passes=num_passes,
            num_drafts=num_drafts,
        )

    def _done_at(self, seconds: float) -> float:
        """Each stage takes its part of a step, and is free for the next one then."""
        begins = max(self._free_at, self.clock.now())
        self.num_steps += 1
        self._free_at = begins + seconds / self._num_stages
        self._last_done_at = max(self._last_done_at, begins + seconds)
        return self._last_done_at

    def _answer(self, output: SchedulerOutput, rows: IntArray) -> tuple[StepOutput, int, int, int]:
        """A token, or candidates, or a vector of each row that has computed all it has; and how many were sampled, how
        many drafts came of how many passes."""
        state = self._rows
        if self._answers is not None:
            answer = self._answers(output.step)
            state.take(answer)
            return answer, len(answer.rows) + len(answer.candidates), 0, 0
        asked = output.step_data.get(NUM_DRAFTS)
        if asked is not None or state.has_drafts(rows):
            return self._answer_with_drafts(output, rows, asked)
        is_done = (state.num_computed[rows] == state.num_total[rows]) & state.is_final[rows]
        answer = StepOutput(step=output.step)
        sampled = self._special(rows[is_done], answer)
        if len(sampled):
            answer.rows = sampled
            answer.token_ids = state.sample(sampled, self._vocab_size)
        return answer, int(np.count_nonzero(is_done)), 0, 0

    def _special(self, done: IntArray, answer: StepOutput) -> IntArray:
        """Answers for rows that pool or whose next token the core chooses; returns the others."""
        state = self._rows
        if not state.num_special:
            return done
        is_pooled = state.is_pooled[done]
        answer.vectors = dict.fromkeys(done[is_pooled].tolist(), b"\0\0\0\0")
        done = done[~is_pooled]
        is_watched = state.num_candidates[done] > 0
        answer.candidates = state.candidates(done[is_watched], self._vocab_size, self.confidence)
        return done[~is_watched]

    def _answer_with_drafts(
        self, output: SchedulerOutput, rows: IntArray, asked: IntArray | None
    ) -> tuple[StepOutput, int, int, int]:
        """The same where rows have drafts, or are to have some: what the step has computed of them is verified, wrong
        ones are cut off, and new ones are proposed behind the token that is sampled."""
        state = self._rows
        answer = StepOutput(step=output.step)
        may_sample = state.is_final[rows] & ~state.is_pooled[rows] & (state.num_candidates[rows] == 0)
        is_done = state.num_computed[rows] == state.num_total[rows]
        special = rows[is_done & state.is_final[rows] & ~may_sample]
        self._special(special, answer)

        pending = state.num_drafts[rows]
        firsts = state.num_total[rows] - pending
        # the token before a draft says what the draft should have been
        num_verified = np.clip(state.num_computed[rows] - firsts + 1, 0, pending) * may_sample
        num_accepted = state.num_right(rows, firsts, num_verified, self._drafts.acceptance)
        samples = ((num_accepted < num_verified) | is_done) & may_sample
        state.verify(rows, firsts, num_accepted, samples)
        emitted = num_accepted + samples
        answer.rows = rows.repeat(emitted)
        answer.token_ids = state.tokens_from(rows, firsts, emitted, self._vocab_size)

        wanted = np.zeros(len(rows), dtype=np.int64)
        if asked is not None:
            by_row = dict(zip(output.rows.tolist(), asked.tolist(), strict=True))
            wanted = np.array([by_row[row] for row in rows.tolist()], dtype=np.int64) * samples
        state.num_drafts[rows] += wanted
        state.num_total[rows] += wanted
        is_told = (pending > 0) | (wanted > 0)
        told = rows[is_told]
        answer.speculated = np.array(
            [told, state.num_computed[told], state.num_total[told], num_verified[is_told], num_accepted[is_told]]
        )
        num_sampled = int((num_verified + samples).sum()) + len(special)
        return answer, num_sampled, int(wanted.sum()), int(wanted.max(initial=0))


# ---------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class _Kind:
    """Layers that see the same tokens."""

    num_layers: int
    bytes_per_token: int
    window: int
    is_chunked: bool


@dataclass(frozen=True)
class _Attention:
    """What attention reads and multiplies, in all layers."""

    kinds: tuple[_Kind, ...]

    def reads(self, starts: IntArray, ends: IntArray) -> tuple[float, float, float]:
        """(tokens of context, bytes, pairs of query and key) of rows that compute from `starts` to `ends`."""
        tokens = float(ends.sum())
        num_bytes = 0.0
        pairs = 0.0
        for kind in self.kinds:
            if not kind.window:
                read = tokens
                seen = float(int((starts + ends + 1) @ (ends - starts)) // 2)
            else:
                read, seen = _within_window(kind, starts, ends)
            num_bytes += read * kind.bytes_per_token
            pairs += seen * kind.num_layers
        return tokens, num_bytes, pairs

    def of_context(self, read: Amount, seen: Amount) -> tuple[Amount, Amount]:
        """(bytes, pairs) of so many tokens of context and pairs a layer, where all tokens are seen."""
        first, *others = self.kinds
        num_bytes = read * first.bytes_per_token
        pairs = seen * first.num_layers
        for kind in others:
            num_bytes = num_bytes + read * kind.bytes_per_token
            pairs = pairs + seen * kind.num_layers
        return num_bytes, pairs


def _within_window(kind: _Kind, starts: IntArray, ends: IntArray) -> tuple[float, float]:
    """What lies within the windows of these queries, once a row; and their pairs."""
    window = kind.window
    firsts = starts - starts % window if kind.is_chunked else np.maximum(starts + 1 - window, 0)
    pairs = _pairs_before(kind, ends) - _pairs_before(kind, starts)
    return float((ends - firsts).sum()), float(pairs.sum())


def _pairs_before(kind: _Kind, places: IntArray) -> IntArray:
    """Of all queries before these places: each sees what is before it, itself included, and no more than its window."""
    window = kind.window
    whole, rest = np.divmod(places, window)
    if not kind.is_chunked:
        whole = np.maximum(places - window, 0)
        rest = places - whole
    pairs: IntArray = rest * (rest + 1) // 2 + whole * (window * (window + 1) // 2 if kind.is_chunked else window)
    return pairs


def _kinds_of(layers: list[LayerSpec]) -> _Attention:
    by_window: dict[tuple[int, bool], list[LayerSpec]] = {}
    for layer in layers:
        if not layer.state_bytes and not layer.is_draft:
            by_window.setdefault((layer.sliding_window, layer.is_chunked), []).append(layer)
    return _Attention(
        tuple(
            _Kind(len(members), sum(one.bytes_per_token for one in members), *window)
            for window, members in by_window.items()
        )
    )


# ---------------------------------------------------------------------------------------------- rows


class _Rows:
    """What a worker knows of its rows, as far as decisions show it."""

    def __init__(self) -> None:
        self.num_computed = np.zeros(64, dtype=np.int64)
        self.num_total = np.zeros(64, dtype=np.int64)
        # of the tokens that count: proposed, and not verified yet
        self.num_drafts = np.zeros(64, dtype=np.int64)
        self.num_candidates = np.zeros(64, dtype=np.int64)
        self.seeds = np.zeros(64, dtype=np.uint64)
        self.is_final = np.zeros(64, dtype=np.bool_)
        self.is_pooled = np.zeros(64, dtype=np.bool_)
        # rows that pool or have candidates
        self.num_special = 0

    def apply(self, output: SchedulerOutput) -> None:
        for fork in output.forked:
            self._reserve(fork.row)
            self._count_special(fork.row, -1)
            for column in (self.num_candidates, self.is_final, self.is_pooled):
                column[fork.row] = column[fork.parent_row]
            self._count_special(fork.row, 1)
            self._begin(fork.row, fork.num_computed_tokens, fork.num_total_tokens, fork.seed, fork.sequence_id)
        for row in output.released:
            self._count_special(row, -1)
            self.num_candidates[row] = 0
            self.is_pooled[row] = False
            self.num_drafts[row] = 0
        for admitted in output.admitted:
            row = admitted.row
            self._reserve(row)
            self._count_special(row, -1)
            self.num_candidates[row] = admitted.num_candidates
            self.is_final[row] = admitted.is_final
            self.is_pooled[row] = bool(admitted.pooling)
            self._count_special(row, 1)
            num_total = len(admitted.token_ids)
            self._begin(row, admitted.num_computed_tokens, num_total, admitted.seed, admitted.sequence_id)
        for row, num_computed in output.progress:
            self.num_computed[row] = num_computed
        for appended in output.appended:
            self.num_total[appended.row] += len(appended.token_ids)
            self.is_final[appended.row] = appended.is_final

    def _begin(self, row: int, num_computed: int, num_total: int, seed: int, sequence_id: int) -> None:
        self.num_computed[row] = num_computed
        self.num_total[row] = num_total
        self.num_drafts[row] = 0
        self.seeds[row] = (seed * 0x632BE59BD9B4E019 + sequence_id) & 0xFFFFFFFFFFFFFFFF

    def _count_special(self, row: int, change: int) -> None:
        if self.num_candidates[row] or self.is_pooled[row]:
            self.num_special += change

    def _reserve(self, row: int) -> None:
        there = len(self.num_total)
        if row < there:
            return
        for name in ("num_computed", "num_total", "num_drafts", "num_candidates", "seeds", "is_final", "is_pooled"):
            setattr(self, name, np.pad(getattr(self, name), (0, max(row + 1 - there, there))))

    def computable(self, rows: IntArray, granted: IntArray) -> tuple[IntArray, IntArray]:
        """Rows and how many tokens each computes: fewer than granted where drafts were fewer than promised."""
        there = self.num_total[rows] - self.num_computed[rows]
        if not np.count_nonzero(granted > there):
            return rows, granted
        granted = np.minimum(granted, there)
        return rows[granted > 0], granted[granted > 0]

    def compute(self, rows: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
        """So many more of each; where that begins and ends."""
        starts = self.num_computed[rows]
        ends = starts + num_tokens
        self.num_computed[rows] = ends
        return starts, ends

    def verify(self, rows: IntArray, firsts: IntArray, num_accepted: IntArray, samples: npt.NDArray[np.bool_]) -> None:
        """So many drafts from `firsts` on turned out right. A row that samples puts its own token behind them."""
        self.num_drafts[rows] = np.where(samples, 0, self.num_drafts[rows] - num_accepted)
        own = rows[samples]
        lengths = (firsts + num_accepted)[samples]
        self.num_total[own] = lengths + 1
        self.num_computed[own] = lengths

    def has_drafts(self, rows: IntArray) -> bool:
        return bool(np.count_nonzero(self.num_drafts[rows]))

    def take(self, answer: StepOutput) -> None:
        """What a worker said: its numbers are exact where it had drafts."""
        np.add.at(self.num_total, answer.rows, 1)
        if answer.speculated.size:
            rows, computed, totals = answer.speculated[:3]
            self.num_computed[rows] = computed
            self.num_total[rows] = totals

    def sample(self, rows: IntArray, vocab_size: int) -> IntArray:
        """A token for each, at its end."""
        totals = self.num_total[rows]
        token_ids = self._tokens_at(rows, totals, vocab_size)
        self.num_total[rows] = totals + 1
        return token_ids

    def sample_many(self, rows: IntArray, steps: IntArray) -> IntArray:
        """So many tokens for each, in steps that also compute all before them. Where the first of them stands."""
        totals = self.num_total[rows]
        self.num_total[rows] = totals + steps
        self.num_computed[rows] = totals + steps - 1
        return totals

    def tokens_from(self, rows: IntArray, firsts: IntArray, counts: IntArray, vocab_size: int) -> IntArray:
        """So many of each, from that place on, one row after the other."""
        which = rows.repeat(counts)
        ends = counts.cumsum()
        places = np.arange(int(counts.sum())) - (ends - counts).repeat(counts) + firsts.repeat(counts)
        return self._tokens_at(which, places, vocab_size)

    def num_right(self, rows: IntArray, firsts: IntArray, counts: IntArray, acceptance: float) -> IntArray:
        """How many of the first so many drafts are right, before the first wrong one."""
        most = int(counts.max(initial=0))
        places = firsts[:, None] + np.arange(most)
        luck = (self._hashes(rows[:, None], places) >> np.uint64(40)) % np.uint64(_PARTS)
        is_right = (luck < acceptance * _PARTS) & (np.arange(most) < counts[:, None])
        num_right: IntArray = np.cumprod(is_right, axis=1, dtype=np.int64).sum(axis=1)
        return num_right

    def candidates(self, rows: IntArray, vocab_size: int, confidence: float = 1.0) -> dict[int, Candidates]:
        """Of each row tokens that differ, each less likely than the one before by a share that follows from the
        place."""
        found = {}
        counts = np.minimum(self.num_candidates[rows], vocab_size).tolist()
        firsts = self._tokens_at(rows, self.num_total[rows], vocab_size).tolist()
        for row, count, first in zip(rows.tolist(), counts, firsts, strict=True):
            # the best one is more or less likely, whatever the steps down from it are
            best = -0.8 * (first // 997 % 31) / 31
            spread = confidence * (0.3 + (first % 997) / 997)
            logprobs = [best - spread * place for place in range(count)]
            found[row] = Candidates([(first + place) % vocab_size for place in range(count)], logprobs)
        return found

    def _tokens_at(self, rows: IntArray, places: IntArray, vocab_size: int) -> IntArray:
        token_ids: IntArray = (self._hashes(rows, places) % np.uint64(vocab_size)).astype(np.int64)
        return token_ids

    def _hashes(self, rows: IntArray, places: IntArray) -> npt.NDArray[np.uint64]:
        mixed = (self.seeds[rows] + places.astype(np.uint64)) * _MIX
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX_AGAIN
        hashes: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(32))
        return hashes
