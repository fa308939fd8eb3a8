"""One system under one workload at one rate: what the paper measures of it, and the rate up to which it keeps up.

Memory is looked at when a request arrives. Arrivals are Poisson, so that what they see on average is the average over
time. Where latency counts, all requests run to their ends, unless those that wait have made it too long by then; else a
run ends with the last arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.simulation.arrivals import Arrival, request_of
from quire.simulation.baselines.run_to_end import RunToEnd
from quire.simulation.baselines.waste import MemoryUse, memory_use
from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.systems import Setup, SystemDeployment, deploy_system
from quire.simulation.paper.workloads import Workload
from quire.simulation.records import Record
from quire.simulation.replica import Replica

# of the requests, while the first ones fill the memory
_WARM_UP = 0.2
# requests between two looks whether it is lost anyway; so many times memory is counted
_LOOK_EVERY = 50
# requests a second: before a step is over all have come
_AT_ONCE = 1e7
_NUM_COUNTS = 1000
# of the greatest rate that is kept up with
_PRECISION = 0.04


@dataclass(frozen=True)
class Case:
    """What runs, whatever its rate is."""

    system: str
    setup: Setup
    workload: Workload
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Measured:
    """Of one run."""

    rate: float
    # seconds a token, mean over requests (3.6.1)
    normalized_latency: float
    # requests and sequences that run at once
    num_batched: float
    # of the KV cache, by kind
    memory: MemoryUse
    # blocks that sharing saves, of those that there would be without it
    saved_share: float
    # of all tokens of context that are kept, those of prompts, which samples of one prompt share
    prompt_share: float
    num_preemptions: float
    # because a sequence would else write into what another one needs
    num_copied_blocks: float = 0
    was_given_up: bool = False


@dataclass
class _Seen:
    """Sums over the looks of one run."""

    num_looks: int = 0
    num_batched: int = 0
    memory: MemoryUse = field(default_factory=MemoryUse)
    num_saved: float = 0.0
    num_held: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0

    def look(self, replica: Replica) -> None:
        scheduler = replica.core.scheduler
        manager, running = scheduler.manager, scheduler.running.requests
        self.num_looks += 1
        self.num_batched += len(running)
        self.memory = self.memory + memory_use(manager, running)
        sequences = [one for request in running for one in request.sequences.values()]
        self.num_saved += manager.account(sequences).num_blocks_saved_by_sharing
        self.num_held += manager.pool.num_held
        for request in running:
            computed = [one.num_computed_tokens for one in request.sequences.values()]
            num_prompt = min(max(computed, default=0), request.num_prompt_tokens)
            self.num_prompt_tokens += num_prompt
            self.num_tokens += num_prompt + sum(max(0, one - num_prompt) for one in computed)


def measure(
    case: Case,
    rate: float,
    num_requests: int,
    assumed: Assumptions,
    *,
    give_up_beyond: float = float("inf"),
    counts_memory: bool = True,
    drains: bool = False,
    seed: int = 0,
) -> Measured:
    """`give_up_beyond`: a normalized latency that is known to be missed is not computed to its end. `drains`: until the
    last request has ended."""
    run = _Run(deploy_system(case.system, case.setup, assumed, dict(case.options)))
    seen = _Seen()
    arrivals = list(case.workload.arrivals(rate, num_requests, assumed, seed))
    most = give_up_beyond * num_requests
    count_every = 1 + num_requests // _NUM_COUNTS
    for number, arrival in enumerate(arrivals):
        run.arrive(number, arrival)
        if counts_memory and number >= _WARM_UP * num_requests and not number % count_every:
            seen.look(run.replica)
        if not number % _LOOK_EVERY and run.sum_of_normalized_latencies() > most:
            break
    window = arrivals[-1].at
    while drains and run.replica.num_open and run.sum_of_normalized_latencies() <= most:
        run.replica.advance(run.replica.clock.now() + window / _LOOK_EVERY)
    looks = max(1, seen.num_looks)
    return Measured(
        rate=rate,
        normalized_latency=run.sum_of_normalized_latencies() / len(run.arrivals),
        num_batched=seen.num_batched / looks,
        memory=seen.memory.shares(),
        saved_share=seen.num_saved / max(1.0, seen.num_saved + seen.num_held),
        prompt_share=seen.num_prompt_tokens / max(1, seen.num_tokens),
        num_preemptions=run.replica.statistics()["num_preemptions_total"],
        num_copied_blocks=run.replica.core.scheduler.manager.num_copied_blocks,
        was_given_up=run.sum_of_normalized_latencies() > most,
    )


def capacity(case: Case, num_requests: int, assumed: Assumptions, seed: int = 0) -> float:
    """Requests a second that it serves when all wait from the start: of the middle half of those that end, while the
    first ones have filled the memory and the last ones have not yet left it."""
    run = _Run(deploy_system(case.system, case.setup, assumed, dict(case.options)))
    for number, arrival in enumerate(case.workload.arrivals(_AT_ONCE, num_requests, assumed, seed)):
        run.arrive(number, arrival)
    run.replica.advance()
    ends = np.sort(np.fromiter(run.ends(), dtype=np.float64))
    first, last = num_requests // 4, 3 * num_requests // 4
    seconds = float(ends[last] - ends[first])
    # so few may be one batch, whose answers end together
    return (last - first) / seconds if seconds else num_requests / float(ends[last])


class _Run:
    """A replica, and how long its requests have taken so far."""

    def __init__(self, deployment: SystemDeployment) -> None:
        self.replica = Replica(deployment, 0, self._end)
        self.arrivals: dict[int, Arrival] = {}
        self._ended: dict[int, float] = {}
        self._vocab_size = deployment.config.facts.vocab_size
        self._policy = self.replica.core.scheduler.policy

    def arrive(self, number: int, arrival: Arrival) -> None:
        self.replica.advance(arrival.at)
        self.replica.add(request_of(arrival, number, self._vocab_size), arrival.at)
        self.arrivals[number] = arrival

    def _end(self, record: Record) -> None:
        self._ended[record.number] = record.ended_at

    def ends(self) -> Iterable[float]:
        """When its requests have ended."""
        return self._ended.values()

    def sum_of_normalized_latencies(self) -> float:
        now = self.replica.clock.now()
        ends = self._ended_as_told()
        return sum(
            (ends.get(number, now) - arrival.at) / arrival.num_output_tokens
            for number, arrival in self.arrivals.items()
        )

    def _ended_as_told(self) -> dict[int, float]:
        """A batch that runs to its end answers then, and not before."""
        if not isinstance(self._policy, RunToEnd):
            return self._ended
        batches = self._policy.batch_by_request
        last: dict[int, float] = {}
        is_open = {batches.get(number) for number in self.arrivals.keys() - self._ended.keys()}
        for number, end in self._ended.items():
            last[batches[number]] = max(last.get(batches[number], 0.0), end)
        return {number: last[batches[number]] for number in self._ended if batches[number] not in is_open}


@dataclass(frozen=True)
class Knee:
    """The greatest rate that keeps normalized latency below a bound, and all that was measured on the way to it."""

    rate: float
    points: tuple[Measured, ...]


def find_knee(run: Callable[[float], Measured], bound: float, start: float) -> Knee:
    """By bisection, of logarithms, between a rate that is kept up with and one that is not."""
    points: list[Measured] = []

    def keeps_up(rate: float) -> bool:
        points.append(run(rate))
        return points[-1].normalized_latency <= bound and not points[-1].was_given_up

    low = high = start
    if keeps_up(start):
        while keeps_up(high := 2 * low):
            low = high
    else:
        while not keeps_up(low := high / 2):
            high = low
    while high / low > 1 + _PRECISION:
        middle = float(np.sqrt(low * high))
        if keeps_up(middle):
            low = middle
        else:
            high = middle
    return Knee(low, tuple(sorted(points, key=lambda point: point.rate)))
