"""What a target between tokens costs and brings: the scheduler itself on a virtual clock, with the lengths of W6.

    python benchmarks/target_between_tokens.py [--step 34 --token 1.6 --rates 0.45 0.9 1.1] [--requests 400]
    python benchmarks/target_between_tokens.py --long 16000 [--pair 1.2]      four streams beside one prompt

Milliseconds of a step of one token and of each further token, and microseconds of a token for each one before it, as
`quire serve` measures them when it starts. The same numbers give the same table on every machine.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from quire.interfaces.cli.bench_serve import arrivals
from quire.interfaces.cli.bench_workloads import batch_lengths
from quire.messages import sequence_id_of, split_sequence_id
from quire.simulation.costs.linear import LinearCosts
from quire.testing.core import CoreUnderTest

_MEAN_PROMPT = 161
_MEAN_ANSWER = 129
_NO_TARGET = (0.0, 1.0)
_NUM_STREAMS = 4


@dataclass
class Times:
    """Of one run."""

    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0


def run(costs: LinearCosts, rate: float, num_requests: int, target: tuple[float, float]) -> Times:
    """`target`: seconds, and how many times as long as without prompts a step may be in any case."""
    prompt_lengths, answer_lengths = batch_lengths(_MEAN_PROMPT, _MEAN_ANSWER)
    draw = random.Random(0)
    kinds = [draw.randrange(len(prompt_lengths)) for _ in range(num_requests)]
    due = list(enumerate(arrivals(num_requests, rate, 0)))
    core = CoreUnderTest(
        num_blocks=4000,
        block_size=16,
        max_num_seqs=256,
        max_model_len=4096,
        budget=2048,
        costs=costs,
        policy="two_level",
        target_seconds=target[0],
        stretch=target[1],
        check_invariants=False,
    )
    times, arrived, latest = Times(), {}, {}
    while due or core.core.has_work:
        while due and due[0][1] <= core.clock.now():
            number, arrived[number] = due.pop(0)
            prompt = [draw.randrange(50) for _ in range(prompt_lengths[kinds[number]])]
            core.add(number, prompt, max_tokens=answer_lengths[kinds[number]])
        if not core.core.has_work:
            core.clock.advance(due[0][1] - core.clock.now())
            continue
        for sequence_id in core.step().sequence_ids.tolist():
            if sequence_id in latest:
                times.gaps.append(core.clock.now() - latest[sequence_id])
            else:
                times.firsts.append(core.clock.now() - arrived[split_sequence_id(sequence_id)[0]])
            latest[sequence_id] = core.clock.now()
    times.seconds = core.clock.now()
    return times


def table(arguments: argparse.Namespace) -> Iterator[str]:
    yield "| a second | target, ms | first token p50, p90, p99, s | between tokens p50, p99, longest, ms | all, s |"
    yield "| --- | --- | --- | --- | --- |"
    step, token = arguments.step / 1e3, arguments.token / 1e3
    costs = LinearCosts(per_step=step - token, per_token=token, per_context_token=2e-6)
    targets = {"none": _NO_TARGET, "auto": (4 * step, 2.0)}
    targets |= {f"{one:g}": (one / 1e3, 1.0) for one in arguments.targets}
    for rate in arguments.rates:
        for name, target in targets.items():
            times = run(costs, rate, arguments.requests, target)
            firsts = ", ".join(f"{_percentile(times.firsts, share):.2f}" for share in (50, 90, 99))
            gaps = ", ".join(f"{1e3 * _percentile(times.gaps, share):,.0f}" for share in (50, 99, 100))
            yield f"| {rate:g} | {name} | {firsts} | {gaps} | {times.seconds:.1f} |"


def beside_a_long_prompt(costs: LinearCosts, length: int, seconds: float, *, counts_alike: bool) -> Times:
    """Gaps of a stream in the last eighth of the time that such a prompt takes beside it and others. `counts_alike`:
    every token counts one, wherever it stands."""
    draw = random.Random(0)
    core = CoreUnderTest(
        num_blocks=(_NUM_STREAMS + 1) * length // 8,
        block_size=16,
        max_num_seqs=8,
        max_model_len=2 * length,
        budget=2048,
        costs=costs,
        policy="two_level",
        target_seconds=seconds,
        check_invariants=False,
    )
    if counts_alike:
        core.scheduler.budget = replace(core.scheduler.budget, growth=0.0)
    for number in range(_NUM_STREAMS):
        core.add(number, [draw.randrange(50) for _ in range(16)], max_tokens=length)
    core.step()
    begin = core.clock.now()
    core.add(_NUM_STREAMS, [draw.randrange(50) for _ in range(length)], max_tokens=1)
    token_times = [begin]
    while sequence_id_of(_NUM_STREAMS, 0) not in core.ends:
        core.step()
        token_times.append(core.clock.now())
    taken = token_times[-1] - begin
    gaps = [after - before for before, after in pairwise(token_times) if after > begin + taken * 7 / 8]
    return Times(gaps=gaps, seconds=taken)


def long_table(arguments: argparse.Namespace) -> Iterator[str]:
    yield f"| a token of {arguments.long:,} | target, ms | between tokens at the end p50, longest, ms | the prompt, s |"
    yield "| --- | --- | --- | --- |"
    step, token = arguments.step / 1e3, arguments.token / 1e3
    costs = LinearCosts(per_step=step - token, per_token=token, per_pair=arguments.pair / 1e6)
    for target in arguments.targets:
        for name, counts_alike in (("counts for what it sees", False), ("counts one", True)):
            times = beside_a_long_prompt(costs, arguments.long, target / 1e3, counts_alike=counts_alike)
            gaps = ", ".join(f"{1e3 * _percentile(times.gaps, share):,.0f}" for share in (50, 100))
            yield f"| {name} | {target:g} | {gaps} | {times.seconds:.1f} |"


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share / 100 * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=34.0, metavar="MS")
    parser.add_argument("--token", type=float, default=1.6, metavar="MS")
    parser.add_argument("--targets", type=float, nargs="+", default=[80.0, 100.0], metavar="MS")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.45, 0.9, 1.1], metavar="X")
    parser.add_argument("--requests", type=int, default=400, metavar="N")
    parser.add_argument("--long", type=int, metavar="N", help="a prompt of so many tokens, in the place of arrivals")
    parser.add_argument("--pair", type=float, default=1.2, metavar="US", help="of a token for each one before it")
    arguments = parser.parse_args()
    for line in long_table(arguments) if arguments.long else table(arguments):
        print(line, flush=True)


if __name__ == "__main__":
    main()
