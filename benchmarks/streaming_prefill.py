"""Time to the first token after the last piece of a prompt, with and without streaming prefill (4.4.4).

    python benchmarks/streaming_prefill.py [--model DIRECTORY] [--tokens 384] [--chunk 128] [--rate 50] [--rounds 9]

Four requests, one after the other in each round, so that whatever else the machine does meets all of them; each after a
pause as long as that between two pieces, with tokens that no other request had, and without a prefix cache:

    streamed    the prompt arrives token by token, `rate` tokens a second; the clock starts with the last one
    whole       the same prompt, sent at once when its last token is there
    one chunk   a prompt of `chunk` tokens, which is what one step computes (max_num_batched_tokens)
    one piece   a prompt as long as the last piece: one token

Medians over the rounds, and the median of what streaming saves or costs against each of the others in the same round.
The last line is one line of JSON.
"""

import argparse
import asyncio
import json
import random
import statistics
import time

from quire import AsyncLLM, SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
OTHERS = ("whole", "one chunk", "one piece")


class Clock:
    """When the last piece was handed over."""

    def __init__(self) -> None:
        self.start = 0.0

    async def spoken(self, tokens: list[int], rate: float):
        """A token at a time, each at its own moment."""
        began = time.perf_counter()
        for number, token in enumerate(tokens):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            self.start = time.perf_counter()
            yield token


async def milliseconds(engine: AsyncLLM, prompt, clock: Clock) -> float:
    clock.start = time.perf_counter()
    async for delta in engine.stream(prompt, ONE_TOKEN):
        if delta.token_ids:
            return (time.perf_counter() - clock.start) * 1e3
    raise AssertionError("nothing was generated")


async def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    pick = random.Random(1)
    found: dict[str, list[float]] = {"streamed": [], **{name: [] for name in OTHERS}}
    sizes = {"streamed": options.tokens, "whole": options.tokens, "one chunk": options.chunk, "one piece": 1}
    engine_options = {"max_num_batched_tokens": options.chunk, "max_num_seqs": 8, "enable_prefix_caching": False}
    async with AsyncLLM(options.model, **engine_options) as engine:
        vocab_size = engine.config.facts.vocab_size
        # two rounds to warm up, which do not count
        for number in range(-2, options.rounds):
            rate = options.rate if number >= 0 else 50 * options.rate
            for name, size in sizes.items():
                prompt = [pick.randrange(vocab_size) for _ in range(size)]
                await asyncio.sleep(1 / options.rate)
                clock = Clock()
                given = clock.spoken(prompt, rate) if name == "streamed" else prompt
                found[name].append(await milliseconds(engine, given, clock))
            if number < 0:
                for times in found.values():
                    times.clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    medians = {name: statistics.median(times) for name, times in found.items()}
    print(f"TTFT after the last piece, median of {options.rounds} rounds, {options.tokens} tokens:")
    for name, times in found.items():
        print(f"  {name:<10} {medians[name]:7.2f} ms   (fastest {min(times):.2f}, slowest {max(times):.2f})")
    ratios = {
        name: statistics.median(one / other for one, other in zip(found["streamed"], found[name], strict=True))
        for name in OTHERS
    }
    print("  streamed / others, round by round: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    result = {
        "benchmark": "streaming_prefill",
        "tokens": options.tokens,
        "chunk": options.chunk,
        "tokens_per_second": options.rate,
        "ttft_ms": {name: round(value, 3) for name, value in medians.items()},
        "streamed_to": {name: round(ratio, 3) for name, ratio in ratios.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
