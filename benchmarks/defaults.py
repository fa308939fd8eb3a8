"""What the defaults leave on the table: every workload with them, and with each setting tuned for it alone (4.2.1).

    python benchmarks/defaults.py [--workloads W2 W6 ...] [--step 34 --token 1.6] [--quick]

The shipped scheduler and KV cache manager on a virtual clock, so the same numbers give the same table on every machine,
however busy it is. Prices are milliseconds of a step of one token and of each further one, as `quire serve` measures
them when it starts. One setting is changed at a time; "together" has the best of each that was better than the default
by itself. A closed load is judged by the time until its last answer, an open one by the mean of latency / output tokens
(3.6.1). Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.config import EngineOptions
from quire.interfaces.cli import bench_workloads as workloads
from quire.interfaces.cli.bench_serve import arrivals
from quire.interfaces.cli.bench_workloads import TokenSource, Work
from quire.messages import split_sequence_id
from quire.simulation.costs.linear import LinearCosts
from quire.testing.core import CoreUnderTest

_VOCABULARY = 50
_POOL_TOKENS = 65_536
_LITTLE_TOKENS = 2_560
_CHOICES: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (256, 512, 1024, 4096, 8192),
    "max_num_seqs": (16, 32, 64, 128),
    "block_size": (8, 32, 64),
    "scheduling_policy": ("fifo", "two_level", "bounded_srtf", "srtf"),
    "enable_prefix_caching": (False,),
    "preemption_mode": ("recompute", "swap"),
}
Settings = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One request, and what is asked when it has ended (an agent's next call, behind the answer)."""

    prompt: list[int]
    length: int
    num_answers: int = 1
    beam_width: int = 0
    results: tuple[list[int], ...] = ()


@dataclass(frozen=True)
class Load:
    """Calls by the time at which they come."""

    name: str
    calls: list[tuple[float, Call]]
    is_open: bool = False
    num_tokens: int = _POOL_TOKENS
    longest: int = 2048


@dataclass
class Outcome:
    """Seconds until the end of all, and of each call its latency by output token."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def score(self, load: Load) -> float:
        return sum(self.latencies) / len(self.latencies) if load.is_open else self.seconds


def loads(scale: float) -> dict[str, Load]:
    """By name; `scale`: how many of the requests."""

    def some(count: int) -> int:
        return max(2, int(count * scale))

    def at_once(work: Work) -> list[tuple[float, Call]]:
        pairs = zip(work.prompts, work.output_lengths, strict=True)
        return [(0.0, Call(list(prompt), length, work.num_answers, work.beam_width)) for prompt, length in pairs]

    source = TokenSource(_VOCABULARY, 0, 0)
    batch = workloads.batch(source, num_requests=some(64))
    arriving = workloads.batch(source, num_requests=some(200))
    due = arrivals(len(arriving.prompts), 0.9, 0)
    streams = at_once(workloads.batch(source, num_requests=some(16)))
    long = [(2.0, call) for _, call in at_once(workloads.prompt(source, input_length=int(16_384 * scale)))]
    chains = workloads.agents(source, num_agents=some(8))
    agents = [
        (0.0, Call(list(beginning), chains.output_length, results=tuple(map(list, results))))
        for beginning, results in zip(chains.beginnings, chains.results, strict=True)
    ]
    found = [
        Load("W2", at_once(batch)),
        Load("W2 with little memory", at_once(batch), num_tokens=_LITTLE_TOKENS),
        Load("W3", at_once(workloads.shared_prefix(source, num_requests=some(32)))),
        Load("W4 n", at_once(workloads.answers(source))),
        Load("W4 beam", at_once(workloads.beams(source))),
        Load("W6", [(when, call) for when, (_, call) in zip(due, at_once(arriving), strict=True)], is_open=True),
        Load("a long prompt beside streams", [*streams, *long], is_open=True, longest=16_640),
        Load("W11", agents, longest=8192),
    ]
    return {load.name: load for load in found}


def run(load: Load, settings: Settings, costs: LinearCosts) -> Outcome:
    """Every call to its end."""
    block_size = settings["block_size"]
    core = CoreUnderTest(
        num_blocks=load.num_tokens // block_size,
        block_size=block_size,
        budget=settings["max_num_batched_tokens"],
        max_num_seqs=settings["max_num_seqs"],
        max_model_len=load.longest,
        prefix_caching=settings["enable_prefix_caching"],
        num_host_blocks=load.num_tokens // block_size,
        preemption_mode=settings["preemption_mode"],
        policy=settings["scheduling_policy"],
        costs=costs,
        vocab_size=_VOCABULARY,
        check_invariants=False,
    )
    outcome = Outcome()
    waiting = sorted(enumerate(load.calls), key=lambda one: -one[1][0])
    open_calls: dict[int, tuple[float, Call]] = {}
    num_calls = len(waiting)
    while waiting or core.core.has_work:
        if not core.core.has_work:
            core.clock.advance(max(0.0, waiting[-1][1][0] - core.clock.now()))
        while waiting and waiting[-1][1][0] <= core.clock.now():
            number, (when, call) = waiting.pop()
            open_calls[number] = (when, call)
            _ask(core, number, call)
        for end in core.step().ends:
            assert end.error is None, end.error
            number, index = split_sequence_id(end.sequence_id)
            if index or number not in open_calls:
                continue
            when, call = open_calls.pop(number)
            outcome.latencies.append((core.clock.now() - when) / call.length)
            if call.results:
                prompt = [*call.prompt, *core.tokens[end.sequence_id], *call.results[0]]
                following = Call(prompt, call.length, results=call.results[1:])
                waiting.append((num_calls, (core.clock.now(), following)))
                num_calls += 1
    outcome.seconds = core.clock.now()
    return outcome


def _ask(core: CoreUnderTest, number: int, call: Call) -> None:
    if call.beam_width:
        core.beam(number, call.prompt, call.beam_width, max_tokens=call.length)
        return
    is_drawn = call.num_answers > 1
    temperature = 1.0 if is_drawn else 0.0
    core.add(number, call.prompt, max_tokens=call.length, n=call.num_answers, temperature=temperature)


def defaults() -> Settings:
    declared = EngineOptions()
    return {name: getattr(declared, name) for name in _CHOICES}


def tuned(load: Load, costs: LinearCosts, measure: Callable[..., Outcome] = run) -> Iterator[tuple[Settings, float]]:
    """Changes and the score with them: none, one at a time, and together what was better."""
    start = defaults()
    with_defaults = measure(load, start, costs).score(load)
    yield {}, with_defaults
    together: Settings = {}
    for name, values in _CHOICES.items():
        best = with_defaults
        for value in values:
            if value == start[name]:
                continue
            score = measure(load, {**start, name: value}, costs).score(load)
            yield {name: value}, score
            if score < best:
                best = score
                together[name] = value
    if len(together) > 1:
        yield together, measure(load, {**start, **together}, costs).score(load)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", metavar="NAME", help=f"of {', '.join(loads(0.1))}")
    parser.add_argument("--step", type=float, default=34.0, metavar="MS")
    parser.add_argument("--token", type=float, default=1.6, metavar="MS")
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    options = parser.parse_args()
    step, token = options.step / 1e3, options.token / 1e3
    costs = LinearCosts(per_step=step - token, per_token=token, per_context_token=2e-6, per_swapped_block=1e-3)
    rows: list[dict[str, Any]] = []
    print("| workload | with the defaults | best | default / best | with |")
    print("| --- | --- | --- | --- | --- |")
    for name, load in loads(0.25 if options.quick else 1.0).items():
        if options.workloads and name not in options.workloads:
            continue
        tried = list(tuned(load, costs))
        first = tried[0][1]
        changes, best = min(tried, key=lambda one: one[1])
        unit = "s a token" if load.is_open else "s"
        how = ", ".join(f"{key}={value}" for key, value in changes.items()) or "the defaults"
        print(f"| {name} | {first:.4g} {unit} | {best:.4g} | {first / best:.3f} | {how} |", flush=True)
        rows.append({"workload": name, "default": first, "best": best, "with": changes, "tried": tried})
    print(json.dumps({"benchmark": "defaults", "step_ms": options.step, "token_ms": options.token, "rows": rows}))


if __name__ == "__main__":
    main()
