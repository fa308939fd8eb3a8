"""A trace through one engine or several: the loop of a simulation.

Arrivals come one by one, so that memory does not grow with the trace; engines are advanced to each of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.simulation.arrivals import Arrival, request_of
from quire.simulation.deployment import Deployment
from quire.simulation.fleet import Fleet
from quire.simulation.records import Record
from quire.simulation.slo import Slo
from quire.simulation.split_fleet import Split, SplitFleet
from quire.simulation.summary import Tally, summary_of

# told how many requests have arrived, and at which time
Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Outcome:
    """Latencies as columns, and all of it as plain data."""

    tally: Tally
    summary: dict[str, Any]


def simulate(
    deployment: Deployment,
    arrivals: Iterable[Arrival],
    *,
    slo: Slo | None = None,
    seed: int = 0,
    on_record: Callable[[Record], None] | None = None,
    progress: Progress | None = None,
    num_replicas: int = 1,
    router: str = "least_time",
    age: float = 0.0,
    may_leap: bool = True,
    split: Split | None = None,
) -> Outcome:
    """Until everything that arrived has ended. `on_record`: gets each request when it has ended. `router`: how one of
    several replicas is chosen, by what was true `age` seconds ago. `split`: replicas of two kinds, and none besides."""
    tally = Tally(slo)

    def end(record: Record) -> None:
        tally.add(record)
        if on_record is not None:
            on_record(record)

    how: dict[str, Any] = {"policy": router, "age": age, "may_leap": may_leap}
    fleet: Fleet | SplitFleet
    fleet = Fleet(deployment, num_replicas, end, **how) if split is None else SplitFleet(deployment, split, end, **how)
    vocab_size = deployment.config.facts.vocab_size
    with _seldom_collected():
        for number, arrival in enumerate(arrivals):
            fleet.add(request_of(arrival, number, vocab_size, seed=seed), arrival.at)
            if progress is not None:
                progress(number + 1, arrival.at)
        fleet.advance()
    works = [replica.work for replica in fleet.replicas]
    statistics = [replica.statistics() for replica in fleet.replicas]
    summary = summary_of(tally, works, statistics, deployment.num_devices)
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
