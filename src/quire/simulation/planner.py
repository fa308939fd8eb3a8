"""The cheapest engines that keep a promise: for each device and number of devices an engine, the fewest replicas.

Replicas get the requests by turns, so one of them is simulated, with its share of the arrivals. More replicas never
make a promise harder to keep, so the fewest are found by doubling and bisection. What one replica fewer would break is
what binds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.device_sheets import DeviceSheet
from quire.errors import CapacityError
from quire.simulation.arrivals import Arrival
from quire.simulation.deployment import Deployment, deploy
from quire.simulation.run import simulate
from quire.simulation.slo import Slo

# dollars an hour of one device, about what a cloud asked in 2025; --prices says others
PRICES = {"a100-40gb": 1.3, "a100-80gb": 1.8, "h100": 2.5, "h200": 3.5, "b200": 5.5, "mi300x": 2.8}
# of the KV cache that is held on average: beyond it memory is what there is too little of
_FULL = 0.85
_BUSY = 0.9


@dataclass(frozen=True)
class Engines:
    """What is bought: so many replicas, each on so many devices that share its layers."""

    device: str
    devices_per_engine: int
    num_replicas: int
    price_per_device: float

    @property
    def num_devices(self) -> int:
        return self.devices_per_engine * self.num_replicas

    @property
    def price(self) -> float:
        """Dollars an hour."""
        return self.num_devices * self.price_per_device

    def __str__(self) -> str:
        engines = f"{self.num_replicas} x " if self.num_replicas > 1 else ""
        return f"{engines}{self.devices_per_engine} {self.device}"


@dataclass(frozen=True)
class Trial:
    """What engines were seen to do."""

    engines: Engines
    # by term of the promise, in seconds
    values: dict[str, float]
    broken: tuple[str, ...]
    # of one replica: share of the time that it computes, share of its KV cache that is held
    busy: float
    memory_held: float

    @property
    def keeps_promise(self) -> bool:
        return not self.broken


@dataclass(frozen=True)
class Found:
    """For one kind of engine: the fewest replicas that keep the promise, and why not one fewer."""

    trial: Trial
    # with one replica fewer; None: there is only one
    fewer: Trial | None = None

    @property
    def binds(self) -> str:
        """What one replica fewer would break, and what it lacks then."""
        if self.fewer is None:
            return "nothing: a single replica keeps it"
        return f"{', '.join(self.fewer.broken)} with {self.fewer.engines}, {_lack(self.fewer)}"


@dataclass(frozen=True)
class Plan:
    """All kinds of engines, cheapest first; those that no number of replicas helps, and those that do not fit."""

    found: list[Found]
    hopeless: list[Trial]
    too_small: dict[str, str]

    @property
    def pareto(self) -> list[Found]:
        """Those of which none that costs as little is as quick in every term."""
        return [one for one in self.found if not any(_is_better(other.trial, one.trial) for other in self.found)]


@dataclass(frozen=True)
class Question:
    """What is to be served, and how well."""

    model: str
    arrivals: Sequence[Arrival]
    slo: Slo
    options: Mapping[str, Any]
    most_devices: int = 64
    seed: int = 0


def plan(
    question: Question,
    sheets: Sequence[DeviceSheet],
    sizes: Sequence[int],
    prices: Mapping[str, float],
    progress: Callable[[Trial], None] | None = None,
) -> Plan:
    """`sizes`: numbers of devices that share an engine. `progress`: told each trial."""
    found: list[Found] = []
    hopeless: list[Trial] = []
    too_small: dict[str, str] = {}
    for sheet in sheets:
        for size in sizes:
            if size > question.most_devices:
                continue
            try:
                options = {**question.options, "tensor_parallel_size": size}
                deployment = deploy(question.model, sheet, options)
                search = _Search(question, deployment, prices[sheet.name], progress or (lambda trial: None))
                one = search.fewest()
            except CapacityError as error:
                too_small[f"{size} {sheet.name}"] = str(error)
                continue
            if one.trial.keeps_promise:
                found.append(one)
            else:
                hopeless.append(one.trial)
    found.sort(key=lambda one: (one.trial.engines.price, sum(one.trial.values.values())))
    return Plan(found, hopeless, too_small)


class _Search:
    """Over the replicas of one kind of engine."""

    def __init__(
        self, question: Question, deployment: Deployment, price: float, progress: Callable[[Trial], None]
    ) -> None:
        self._question = question
        self._deployment = deployment
        self._price = price
        self._progress = progress
        self._trials: dict[int, Trial] = {}

    def fewest(self) -> Found:
        """If none keeps the promise, what as many as may be had come to."""
        most = max(1, self._question.most_devices // self._deployment.num_devices)
        most = min(most, len(self._question.arrivals))
        low, high = 0, 1
        while not self._try(high).keeps_promise:
            low = high
            if high == most:
                return Found(self._try(most))
            high = min(most, 2 * high)
        while high - low > 1:
            middle = (low + high) // 2
            if self._try(middle).keeps_promise:
                high = middle
            else:
                low = middle
        return Found(self._try(high), self._try(low) if low else None)

    def _try(self, num_replicas: int) -> Trial:
        if num_replicas in self._trials:
            return self._trials[num_replicas]
        question = self._question
        outcome = simulate(self._deployment, question.arrivals[::num_replicas], slo=question.slo, seed=question.seed)
        statistics = outcome.tally.statistics()
        verdicts = outcome.summary["slo"]["terms"]
        errors = outcome.summary["requests"]["errors"]
        engine = outcome.summary["engines"][0]
        trial = Trial(
            engines=Engines(self._deployment.device.name, self._deployment.num_devices, num_replicas, self._price),
            values={str(term): statistics[term.metric][term.statistic or "max"] for term in question.slo.terms},
            broken=(*(term for term, holds in verdicts.items() if not holds), *errors),
            busy=engine["busy"],
            memory_held=engine["kv_blocks_held"],
        )
        self._trials[num_replicas] = trial
        self._progress(trial)
        return trial


def _lack(trial: Trial) -> str:
    """In words, what a replica has too little of."""
    if trial.memory_held > _FULL:
        return f"whose KV cache is {trial.memory_held:.0%} full"
    if trial.busy > _BUSY:
        return f"which compute {trial.busy:.0%} of the time"
    return f"whose steps are too long ({trial.busy:.0%} busy, KV cache {trial.memory_held:.0%} full)"


def _is_better(other: Trial, than: Trial) -> bool:
    """In something, and worse in nothing."""
    pairs = [(other.engines.price, than.engines.price)]
    pairs += [(other.values[term], than.values[term]) for term in than.values]
    return all(mine <= theirs for mine, theirs in pairs) and any(mine < theirs for mine, theirs in pairs)
