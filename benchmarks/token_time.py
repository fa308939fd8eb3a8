"""What a token of one request takes, by parts: the clock between two steps of an LLM, for a model of any size.

    python benchmarks/token_time.py [MODEL] [--tokens 400] [--rounds 10] [--num-threads 1]

Microseconds, the 2nd, 10th, 25th, 50th and 75th percentile. Steps that nothing else has interrupted are the quickest
ones, so that a busy machine shows in the low percentiles what a quiet one takes.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from itertools import pairwise

from quire import LLM, SamplingParams
from quire.config import EMBEDDED
from quire.engine_core.driver import CoreDriver
from quire.observability.step_times import StepTimes

_SHARES = (0.02, 0.1, 0.25, 0.5, 0.75)
# of a request, while its prompt is computed and the first pages are touched
_STEPS_TO_SKIP = 5


class Clock:
    """Sees each step begin, and each part of it end."""

    def __init__(self) -> None:
        self.beginnings: list[float] = []
        self.parts: dict[str, list[float]] = defaultdict(list)
        step = CoreDriver.step
        ends = StepTimes.ends

        def timed_step(driver: CoreDriver) -> None:
            self.beginnings.append(time.perf_counter())
            step(driver)

        def timed_ends(times: StepTimes, phase: str) -> None:
            since = times._since
            ends(times, phase)
            self.parts[f"{times._prefix}{phase}"].append(times._since - since)

        CoreDriver.step = timed_step  # type: ignore[method-assign]
        StepTimes.ends = timed_ends  # type: ignore[method-assign]


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return "".join(f"{ordered[int(len(ordered) * share)] * 1e6:9.0f}" for share in _SHARES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default=EMBEDDED)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--num-threads", type=int, default=1)
    arguments = parser.parse_args()
    clock = Clock()
    sampling = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    between: list[float] = []
    # as a quiet machine has it where steps are short; a busy one may take them for long
    with LLM(arguments.model, num_threads=arguments.num_threads, async_scheduling=False) as llm:
        for number in range(arguments.rounds + 1):
            clock.beginnings.clear()
            llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], sampling, use_tqdm=False)
            if number == 0:
                # it has warmed up
                clock.parts.clear()
                continue
            steps = clock.beginnings[_STEPS_TO_SKIP:]
            between += [end - start for start, end in pairwise(steps)]
    print(f"{'':20}" + "".join(f"{share:9.0%}" for share in _SHARES))
    print(f"{'a token':20}{percentiles(between)}")
    for name, seconds in clock.parts.items():
        print(f"{name:20}{percentiles(seconds)}")


if __name__ == "__main__":
    main()
