"""What a decision costs with many requests waiting, for each policy: CPU microseconds of a call of schedule().

    python benchmarks/policy_overhead.py [--policies fifo,two_level] [--steps 200] [--plot FILE.svg]

Real scheduler and KV cache manager, an executor that answers at once, 128 rows. What waits are different prompts of 200
to 400 tokens. "turnover": outputs of 32 tokens, so that about four requests end and four begin in each step, and as
many arrive. "rows full" and "blocks full": nobody ends, and nobody can begin, for want of a row or of blocks. Median
and 99th percentile over the steps. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from policy_runs import POLICIES, core_of
from policy_traces import VOCAB, Engine, request_of

from quire.simulation.charts.line_chart import Line, line_chart

NUM_WAITING = (10, 100, 1_000, 10_000)
NUM_ROWS = 128
MOST_SECONDS = 20.0
ROOMY = Engine(num_slots=400_000, max_num_seqs=NUM_ROWS, max_model_len=4096)
# kind: the limits, and the length of outputs
KINDS = {
    "turnover": (ROOMY, 32),
    "rows full": (ROOMY, 3_000),
    # room for about 100 of the prompts with 600 tokens behind each
    "blocks full": (replace(ROOMY, num_slots=90_000, max_num_seqs=2 * NUM_ROWS), 3_000),
}
WARM_UP = 60


class Load:
    """A core that is full, with so many requests waiting behind."""

    def __init__(self, policy: str, kind: str, num_waiting: int) -> None:
        engine, self._num_output = KINDS[kind]
        self._chance = random.Random(5)
        self._num_waiting = num_waiting
        self._number = 0
        self._core = core_of(engine, policy)
        # the running batch begins alone: who waits is looked at when it is full
        self._fill(engine.max_num_seqs // 2)
        for _ in range(WARM_UP):
            self.step()
        self._num_waiting = num_waiting

    def _fill(self, count: int) -> None:
        for _ in range(count):
            prompt = self._chance.choices(range(VOCAB), k=self._chance.randint(200, 400))
            self._core.core.add(request_of(self._number, prompt, self._num_output))
            self._number += 1

    def step(self) -> float:
        """CPU seconds of the decision; what waits is topped up before."""
        scheduler = self._core.scheduler
        self._fill(max(0, self._num_waiting - len(scheduler.queues)))
        start = time.process_time()
        decision = scheduler.schedule()
        spent = time.process_time() - start
        assert decision is not None
        scheduler.update_from_output(self._core.core.executor.execute(decision).result())
        return spent


def microseconds(policy: str, kind: str, num_waiting: int, num_steps: int) -> dict[str, float]:
    load = Load(policy, kind, num_waiting)
    gc.collect()
    spent, begin = [], time.monotonic()
    while len(spent) < num_steps and time.monotonic() - begin < MOST_SECONDS:
        spent.append(1e6 * load.step())
    return {"median": round(statistics.median(spent), 1), "p99": round(float(np.percentile(spent, 99)), 1)}


def plot(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        Line(policy, [(count, results["turnover"][policy][count]["median"] / 1000) for count in NUM_WAITING])
        for policy in results["turnover"]
    ]
    return line_chart(
        "A scheduling decision, four requests begin in it", "requests that wait", "milliseconds", lines,
        log_x=True, log_y=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(list(POLICIES)[:4]))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", type=Path, help="write the figure to this file, as SVG")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    results: dict[str, dict[str, Any]] = {kind: {policy: {} for policy in policies} for kind in KINDS}
    print(f"{'median, p99 in us':<14}{'waiting':<14}" + "".join(f"{count:>18,}" for count in NUM_WAITING))
    for kind in KINDS:
        for policy in policies:
            print(f"{kind:<14}{policy:<14}", end="", flush=True)
            for count in NUM_WAITING:
                results[kind][policy][count] = spent = microseconds(policy, kind, count, arguments.steps)
                print(f"{spent['median']:>9.0f}{spent['p99']:>9.0f}", end="", flush=True)
            print()
    if arguments.plot:
        arguments.plot.write_text(plot(results), encoding="utf-8")
    print(json.dumps({"schedule_us": results}))


if __name__ == "__main__":
    main()
