"""A token of one stream: where Python is between a step's programs, a step is one call of the library, or several
tokens are.

    python benchmarks/between_programs.py MODEL [--quantization int8] [--rounds 9]

The ways take turns in one engine, so that other work and the machine's memory treat them alike. Milliseconds: a token,
and what of it is spent outside of the library; medians of the rounds, lowest and highest.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from quire import AsyncLLM, SamplingParams
from quire.worker.kernels.cpu.decode import DecodeCall
from quire.worker.kernels.cpu.program import Program
from quire.worker.step_computation import StepComputation

_NUM_TOKENS = 64
# of the first tokens one waits for the prompt
_SKIPPED = 4


class Clock:
    """Adds what calls of these functions take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)


async def measured(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """(a token, what is outside of the library) of each round, in milliseconds."""
    clock = Clock()
    clock.watch(Program, "run")
    clock.watch(DecodeCall, "run")
    decoded = StepComputation._decoded
    ways: dict[str, Any] = {"Python between": lambda *arguments: None, "one call": decoded, "bursts": decoded}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    parameters = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    engine = AsyncLLM(
        model=options.model,
        quantization=options.quantization,
        max_model_len=1024,
        engine_process=False,
        # shorter than any token: who reads each of them gets them one by one
        burst_time=1e-6,
    )
    async with engine:
        for number in range(-1, options.rounds):
            for way in random.sample(list(ways), len(ways)):
                StepComputation._decoded = ways[way]  # type: ignore[method-assign]
                prompt = [random.randrange(1000) for _ in range(8)]
                moments = []
                stream = engine.generate({"prompt_token_ids": prompt}, parameters, in_bursts=way == "bursts")
                async for output in stream:
                    moments.append((time.perf_counter(), clock.seconds, len(output.outputs[0].token_ids)))
                start, inside, first = next(moment for moment in moments if moment[2] > _SKIPPED)
                end, all_inside, last = moments[-1]
                count = last - first
                token = 1e3 * (end - start) / count
                if number >= 0:
                    found[way].append((token, token - 1e3 * (all_inside - inside) / count))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=9)
    found = asyncio.run(measured(parser.parse_args()))
    print("| | a token, ms | outside of the library, ms |\n| --- | --- | --- |")
    for way, rounds in found.items():
        cells = [f"{statistics.median(of):.2f} ({min(of):.2f} to {max(of):.2f})" for of in zip(*rounds, strict=True)]
        print(f"| {way} | {' | '.join(cells)} |")
    plain, *others = found.items()
    for way, rounds in others:
        ratios = [one[0] / other[0] for one, other in zip(rounds, plain[1], strict=True)]
        print(f"{way}: {statistics.median(ratios):.3f} of the first ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
