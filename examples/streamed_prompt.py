"""A prompt that is computed while it is spoken: word after word goes to the engine, and the answer comes at once.

python examples/streamed_prompt.py "What is seven plus five?" --words-per-second 5
"""

import argparse
import asyncio
import time

from quire import AsyncLLM, SamplingParams


async def spoken(text: str, words_per_second: float, said: list[float]):
    """Stands for a microphone, a keyboard, or a search whose results trickle in."""
    for number, word in enumerate(text.split(" ")):
        await asyncio.sleep(1 / words_per_second if number else 0)
        yield f" {word}" if number else word
    said.append(time.perf_counter())


async def listen(engine: AsyncLLM, text: str, words_per_second: float, max_tokens: int) -> str:
    said: list[float] = []
    answer, waited = "", None
    prompt = spoken(text, words_per_second, said)
    async for delta in engine.stream(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)):
        waited = waited if waited is not None else time.perf_counter() - said[0]
        answer += delta.text
    print(f"{text!r} -> {answer!r}: the first token came {1000 * (waited or 0):.0f} ms after the last word")
    return answer


async def main(arguments: argparse.Namespace) -> None:
    async with AsyncLLM(arguments.model) as engine:
        await listen(engine, arguments.text, arguments.words_per_second, arguments.max_tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="Once upon a time there was a small dog who")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--words-per-second", type=float, default=5.0)
    parser.add_argument("--max-tokens", type=int, default=20)
    asyncio.run(main(parser.parse_args()))
