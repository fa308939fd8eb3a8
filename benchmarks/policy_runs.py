"""Runs a trace through the real core on the virtual clock, and says what its requests saw. Used by policies.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from policy_traces import GPU, VOCAB, Engine, Trace

from quire.engine_core.executor.modelled import ModelledExecutor, VirtualClock
from quire.engine_core.scheduler.policies.bounded_srtf import BoundedShortest
from quire.engine_core.scheduler.scheduler import Scheduler
from quire.messages import EngineRequest, SchedulerOutput, split_sequence_id
from quire.testing.core import CoreUnderTest

# by the name that tables show: the policy's own, and its options
POLICIES: dict[str, tuple[str, dict[str, float]]] = {
    "fifo": ("fifo", {}),
    "priority": ("priority", {}),
    "srtf": ("srtf", {}),
    "two_level": ("two_level", {}),
    "bounded_srtf": ("bounded_srtf", {}),
    "two_level, no share": ("two_level", {"progress_share": 0.0}),
}


@dataclass
class Seen:
    """One request, in seconds of the virtual clock and in steps."""

    request: EngineRequest
    # its number in the order of arrival
    place: int
    arrival: float
    arrival_step: int
    first_token: float = 0.0
    first_token_step: int = 0
    end: float = 0.0
    output: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def num_steps_to_first(self) -> int:
        return self.first_token_step - self.arrival_step


class TimedScheduler:
    """The scheduler, and the CPU seconds of each decision."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.seconds: list[float] = []

    def schedule(self) -> SchedulerOutput | None:
        start = time.process_time()
        decision = self._scheduler.schedule()
        self.seconds.append(time.process_time() - start)
        return decision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


@dataclass
class Outcome:
    """What a run gave."""

    seen: dict[int, Seen]
    hit_rate: float
    num_preemptions: int
    num_steps: int
    schedule_seconds: list[float]

    def ttfts(self, priority: int | None = None) -> list[float]:
        """Of all requests, or of those of one priority."""
        return [one.ttft for one in self.seen.values() if priority in (None, one.request.priority)]

    def row(self) -> dict[str, float]:
        ttfts = self.ttfts()
        normalised = [(one.end - one.arrival) / len(one.output) for one in self.seen.values()]
        # the first steps warm caches up
        seconds = self.schedule_seconds[20:] or self.schedule_seconds
        return {
            "ttft_mean": round(statistics.mean(ttfts), 4),
            "ttft_p99": round(float(np.percentile(ttfts, 99)), 4),
            "ttft_worst": round(max(ttfts), 4),
            "hit_rate": round(self.hit_rate, 4),
            "normalised_latency": round(statistics.mean(normalised), 5),
            "schedule_us_median": round(1e6 * statistics.median(seconds), 1),
            "schedule_us_p99": round(1e6 * float(np.percentile(seconds, 99)), 1),
            "steps": self.num_steps,
            "preemptions": self.num_preemptions,
        }


def core_of(engine: Engine, policy: str, clock: VirtualClock, **further: float) -> CoreUnderTest:
    """The real core on modelled workers. Each run has a policy of its own, for they have state."""
    name, options = POLICIES[policy]
    overtaking = further.pop("overtaking", None)
    core = CoreUnderTest(
        num_blocks=engine.num_slots // engine.block_size,
        block_size=engine.block_size,
        budget=engine.budget,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        policy=name if overtaking is None else BoundedShortest(overtaking=overtaking),
        policy_options={**options, **further},
        vocab_size=VOCAB,
        check_invariants=False,
    )
    core.core.executor = ModelledExecutor(GPU.capacity, GPU.costs, clock=clock, vocab_size=VOCAB)
    return core


def run(trace: Trace, policy: str, **options: float) -> Outcome:
    """Every request of the trace to its end. `options` are further ones of the policy."""
    clock = VirtualClock()
    under_test = core_of(trace.engine, policy, clock, **options)
    core, source = under_test.core, trace.source()
    timed = TimedScheduler(core.scheduler)
    core.scheduler = cast(Scheduler, timed)
    seen: dict[int, Seen] = {}
    num_steps = 0
    while (moment := source.next_moment()) is not None or core.has_work:
        if not core.has_work and moment is not None:
            clock.wait_until(moment)
        while (moment := source.next_moment()) is not None and moment <= clock.now():
            arrival, request = source.take()
            seen[request.request_id] = Seen(request, len(seen), arrival, num_steps)
            core.add(request)
        result = core.step()
        num_steps += bool(result.step)
        now = clock.now()
        for sequence_id, token in zip(result.sequence_ids.tolist(), result.token_ids.tolist(), strict=True):
            one = seen[split_sequence_id(sequence_id)[0]]
            if not one.output:
                one.first_token, one.first_token_step = now, num_steps
            one.output.append(token)
        for end in result.ends:
            assert end.error is None, end.error
            one = seen[split_sequence_id(end.sequence_id)[0]]
            one.end = now
            source.ended(one.request, one.output, now)
    assert all(one.end for one in seen.values()), "a request never ended"
    counted = under_test.scheduler.statistics()
    queried = counted["num_prefix_queried_tokens_total"]
    return Outcome(
        seen=seen,
        hit_rate=counted["num_prefix_hit_tokens_total"] / queried if queried else 0.0,
        num_preemptions=int(counted["num_preemptions_total"]),
        num_steps=num_steps,
        schedule_seconds=timed.seconds,
    )


def capacity(make: Callable[[float], Trace]) -> float:
    """Requests a second that FIFO can serve: all come at once; the middle of the run, where the engine is full."""
    outcome = run(make(0.0), "fifo")
    ends = sorted(one.end for one in outcome.seen.values())
    low, high = len(ends) // 5, 3 * len(ends) // 5
    return (high - low) / (ends[high] - ends[low])
