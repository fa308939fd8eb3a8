"""Who is ahead of whom in the paper's figures, each as a chain of numbers that must rise.

Rates are what a system serves when requests wait from the start: a knee says the same and takes ten runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from quire.engine_core.executor.modelled import StepWork
from quire.simulation.paper.assumptions import Assumptions
from quire.simulation.paper.experiment import Case
from quire.simulation.paper.lab import CapacityOf, RunAt, Task
from quire.simulation.paper.systems import (
    FASTER_TRANSFORMER,
    LLAMA_13B,
    MAX,
    OPT_13B,
    OPT_66B,
    OPT_175B,
    ORACLE,
    PAGED,
    POW2,
    Setup,
    deploy_system,
)
from quire.simulation.paper.workloads import ALPACA, CHAT, SHAREGPT, Workload, translation

# what was run, by task
Results = dict[Task, Any]
Number = Callable[[Results], float]

_RISING = (FASTER_TRANSFORMER, MAX, POW2, ORACLE, PAGED)
_SHORT = {FASTER_TRANSFORMER: "FT", MAX: "Max", POW2: "Pow2", ORACLE: "Oracle", PAGED: "vLLM"}
# three systems are alike if the best is ahead by no more
_ALIKE = 1.15


@dataclass(frozen=True)
class Ordering:
    """`numbers` rise, each by its name."""

    figure: str
    text: str
    numbers: tuple[tuple[str, Number], ...]
    tasks: tuple[Task, ...]

    def values(self, results: Results) -> dict[str, float]:
        return {name: number(results) for name, number in self.numbers}

    def lead(self, results: Results) -> float:
        """The least ratio of a number to the one before it; above 1 the ordering holds."""
        values = list(self.values(results).values())
        return min(later / max(earlier, 1e-9) for earlier, later in pairwise(values))


def orderings(assumed: Assumptions) -> list[Ordering]:
    """Workloads of some figures are made of what is assumed."""
    return [
        *_memory(),
        *_basic_sampling(),
        *_decoding(),
        *_savings(),
        *_prefixes(assumed),
        _chat(),
        *_ablations(assumed),
    ]


def _of(name: str, tasks: Sequence[Task], texts: Sequence[str], attribute: str) -> tuple[tuple[str, Number], ...]:
    def number(task: Task) -> Number:
        return lambda results: float(getattr(results[task], attribute)) if attribute else float(results[task])

    return tuple((f"{name}{text}", number(task)) for task, text in zip(tasks, texts, strict=True))


def _memory() -> list[Ordering]:
    """Figures 3.2 and 3.13."""
    systems = _RISING[1:]
    names = [_SHORT[system] for system in systems]
    found = []
    for workload, rate, num_requests in ((SHAREGPT, 2.0, 400), (ALPACA, 30.0, 800)):
        tasks = tuple(RunAt(Case(system, OPT_13B, workload), rate, num_requests) for system in systems)
        if workload is SHAREGPT:
            shares = tuple(
                (name, lambda results, task=task: results[task].memory.token_states)
                for name, task in zip(names, tasks, strict=True)
            )
            found.append(Ordering("fig3.2", "tokens in memory", shares, tasks))
        numbers = _of("", tasks, names, "num_batched")
        found.append(Ordering("fig3.13", f"requests at once, {workload.name}", numbers, tasks))
    return found


def _serves(system: str, setup: Setup, workload: Workload, num_requests: int, **options: Any) -> CapacityOf:
    return CapacityOf(Case(system, setup, workload, tuple(sorted(options.items()))), num_requests)


def _basic_sampling() -> list[Ordering]:
    """Figure 3.12, and that memory matters least in its panel f."""
    panels = (
        ("a", OPT_13B, SHAREGPT, 200),
        ("b", OPT_66B, SHAREGPT, 200),
        ("c", OPT_175B, SHAREGPT, 600),
        ("d", OPT_13B, ALPACA, 800),
        ("e", OPT_66B, ALPACA, 800),
        ("f", OPT_175B, ALPACA, 1000),
    )
    found = []
    by_panel: dict[str, dict[str, CapacityOf]] = {}
    for letter, setup, workload, num_requests in panels:
        tasks = {system: _serves(system, setup, workload, num_requests) for system in _RISING[1:]}
        tasks[FASTER_TRANSFORMER] = _serves(FASTER_TRANSFORMER, setup, workload, num_requests // 3)
        by_panel[letter] = tasks
        systems = [system for system in _RISING if letter != "f" or system not in (POW2, ORACLE)]
        chosen = tuple(tasks[system] for system in systems)
        numbers = _of("", chosen, [_SHORT[system] for system in systems], "")
        found.append(Ordering(f"fig3.12{letter}", f"{setup.model}, {workload.name}", numbers, chosen))
    for system in (ORACLE, POW2):
        ahead = {letter: (by_panel[letter][PAGED], by_panel[letter][system]) for letter in "fed"}
        for other in "ed":
            numbers = tuple((f"in {letter}", _ratio(*ahead[letter])) for letter in ("f", other))
            text = f"vLLM / {_SHORT[system]} is less in f than in {other}"
            found.append(Ordering("fig3.12f", text, numbers, (*ahead["f"], *ahead[other])))
    return found


def _ratio(above: Task, below: Task) -> Number:
    return lambda results: float(results[above] / results[below])


def _decoding() -> list[Ordering]:
    """Figure 3.14: factors over Oracle."""

    def pair(n: int, *, is_beam_search: bool) -> tuple[Task, Task]:
        workload = replace(ALPACA, num_sequences=n, is_beam_search=is_beam_search)
        num_requests = 800 if n == 1 else 100
        return (
            _serves(PAGED, OPT_13B, workload, num_requests),
            _serves(ORACLE, OPT_13B, workload, num_requests),
        )

    basic = pair(1, is_beam_search=False)
    samples = {n: pair(n, is_beam_search=False) for n in (2, 6)}
    beams = {n: pair(n, is_beam_search=True) for n in (2, 4, 6)}
    found = []
    for text, chain in (
        ("vLLM / Oracle: samples", {"basic": basic, "6 samples": samples[6]}),
        ("vLLM / Oracle: beams", {"basic": basic, "6 beams": beams[6]}),
        ("vLLM / Oracle: wider beams", {f"{n} beams": one for n, one in beams.items()}),
        ("vLLM / Oracle: beams and samples", {"6 samples": samples[6], "6 beams": beams[6]}),
    ):
        numbers = tuple((name, _ratio(*tasks)) for name, tasks in chain.items())
        found.append(Ordering("fig3.14", text, numbers, tuple(task for tasks in chain.values() for task in tasks)))
    return found


def _savings() -> list[Ordering]:
    """Figure 3.15."""

    def run(dataset: Workload, n: int, *, is_beam_search: bool) -> RunAt:
        workload = replace(dataset, num_sequences=n, is_beam_search=is_beam_search)
        rate, num_requests = (8.0, 80) if dataset is ALPACA else (0.8, 24)
        return RunAt(Case(PAGED, OPT_13B, workload), rate / n, num_requests)

    found = []
    for dataset in (ALPACA, SHAREGPT):
        for is_beam_search, kind in ((False, "samples"), (True, "beams")):
            tasks = tuple(run(dataset, n, is_beam_search=is_beam_search) for n in (2, 4, 6))
            numbers = _of("", tasks, [f"{n} {kind}" for n in (2, 4, 6)], "saved_share")
            found.append(Ordering("fig3.15", f"blocks saved, {dataset.name}, {kind}", numbers, tasks))
        tasks = (run(dataset, 6, is_beam_search=False), run(dataset, 2, is_beam_search=True))
        numbers = _of("", tasks, ["6 samples", "2 beams"], "saved_share")
        found.append(Ordering("fig3.15", f"blocks saved, {dataset.name}, beams and samples", numbers, tasks))
    for is_beam_search, kind in ((False, "samples"), (True, "beams")):
        tasks = tuple(run(dataset, 6, is_beam_search=is_beam_search) for dataset in (ALPACA, SHAREGPT))
        numbers = _of("6 " + kind + ", ", tasks, ["Alpaca", "ShareGPT"], "saved_share")
        found.append(Ordering("fig3.15", f"blocks saved, longer prompts, {kind}", numbers, tasks))
    return found


def _prefixes(assumed: Assumptions) -> list[Ordering]:
    """Figure 3.16."""
    chain: dict[str, tuple[Task, Task]] = {}
    for num_examples, num_tokens in ((1, 80), (5, 341)):
        workload = translation(num_examples, num_tokens, assumed)
        paged = _serves(PAGED, LLAMA_13B, workload, 1500, enable_prefix_caching=True)
        chain[f"{num_examples}-shot"] = (paged, _serves(ORACLE, LLAMA_13B, workload, 1000))
    numbers = (("level", lambda results: 1.0), *((name, _ratio(*tasks)) for name, tasks in chain.items()))
    tasks = tuple(task for pair in chain.values() for task in pair)
    return [Ordering("fig3.16", "vLLM / Oracle", numbers, tasks)]


def _chat() -> Ordering:
    """Figure 3.17: the three of Orca are alike, and vLLM is ahead of them."""
    tasks = {system: _serves(system, OPT_13B, CHAT, 200) for system in (MAX, POW2, ORACLE, PAGED)}
    orcas = tuple(tasks[system] for system in (MAX, POW2, ORACLE))
    numbers = (
        ("best Orca", lambda results: max(results[task] for task in orcas)),
        ("worst Orca x 1.15", lambda results: _ALIKE * min(results[task] for task in orcas)),
        ("vLLM", lambda results: float(results[tasks[PAGED]])),
    )
    return Ordering("fig3.17", "chat: Orcas are alike, vLLM is ahead", numbers, tuple(tasks.values()))


def _ablations(assumed: Assumptions) -> list[Ordering]:
    """Figures 3.18b and 3.19a."""
    sizes = (16, 256)
    tasks = tuple(RunAt(Case(PAGED, OPT_13B, ALPACA, (("block_size", n),)), 24.0, 1200, drains=True) for n in sizes)
    numbers = _of("blocks of ", tasks, [str(size) for size in sizes], "normalized_latency")
    slower = Ordering("fig3.18", "Alpaca is slower with large blocks", numbers, tasks)
    deployments = {size: deploy_system(PAGED, OPT_13B, assumed, {"block_size": size}) for size in (1, 16, 256)}
    work = StepWork(num_rows=1, num_tokens=1024, num_sampled=1, attention_pairs=1024**2 / 2 * 40)

    def gain(size: int) -> Number:
        """How much dearer swapping is than recomputation."""
        one = deployments[size]
        seconds = 2 * 1024 / size * one.swap_seconds_per_block
        return lambda results: float(seconds / one.costs.seconds(work))

    numbers = tuple((f"blocks of {size}", gain(size)) for size in (256, 16, 1))
    return [slower, Ordering("fig3.19", "swapping / recomputation, smaller blocks", numbers, ())]
