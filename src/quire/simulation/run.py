"""A trace through one engine or several.

Arrivals come one by one, so that memory does not grow with the trace; engines are advanced to each of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.simulation.alone import Alone
from quire.simulation.arrivals import Arrival, Progress, Requests
from quire.simulation.deployment import Deployment
from quire.simulation.fleet import Fleet
from quire.simulation.forks import CAN_FORK
from quire.simulation.records import Record
from quire.simulation.slo import Slo
from quire.simulation.split_fleet import Split, SplitFleet
from quire.simulation.summary import Tally, summary_of

# requests of a process
_FEWEST = 256


@dataclass(frozen=True)
class Outcome:
    """Latencies as columns, and all of it as plain data."""

    tally: Tally
    summary: dict[str, Any]


def simulate(
    deployment: Deployment,
    arrivals: Iterable[Arrival],
    *,
    num_requests: int | None = None,
    slo: Slo | None = None,
    seed: int = 0,
    on_record: Callable[[Record], None] | None = None,
    progress: Progress | None = None,
    num_replicas: int = 1,
    router: str = "least_time",
    age: float = 0.0,
    may_leap: bool = True,
    split: Split | None = None,
    processes: int = 1,
) -> Outcome:
    """Until everything that arrived has ended. `num_requests`: of the arrivals, where that is known. `on_record`: gets
    each request when it has ended. `router`: how one of several replicas is chosen, by what was true `age` seconds
    ago. `split`: replicas of two kinds, and none besides. `processes`: so many share the work where it can be divided,
    which changes nothing but the time it takes."""
    tally = Tally(slo)

    def end(record: Record) -> None:
        tally.add(record)
        if on_record is not None:
            on_record(record)

    if num_requests is None:
        num_requests = len(arrivals) if isinstance(arrivals, Sized) else 0
    requests = Requests(
        arrivals, deployment.config.facts.vocab_size, num_requests=num_requests, seed=seed, progress=progress
    )
    # fewer are not worth one of them
    processes = min(processes, max(1, num_requests // _FEWEST)) if CAN_FORK else 1
    fleet: Alone | Fleet | SplitFleet
    with _seldom_collected():
        if split is not None:
            fleet = SplitFleet(deployment, split, end, policy=router, age=age, may_leap=may_leap)
        elif num_replicas > 1:
            forked = (processes, requests) if processes > 1 else None
            fleet = Fleet(deployment, num_replicas, end, policy=router, age=age, may_leap=may_leap, forked=forked)
        else:
            fleet = Alone(deployment, end, may_leap=may_leap, processes=processes)
        fleet.run(requests)
    summary = summary_of(tally, fleet.works(), fleet.statistics(), deployment.num_devices)
    return Outcome(tally, {**summary, **fleet.summary()})


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """A simulation makes few cycles, and many objects that live as long as their requests."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
