"""Prompts in pieces on the real engine: the outcome is that of the whole prompt, token for token."""

import asyncio
import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, BeamSearchParams, RequestOutput, SamplingParams
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.testing.tiny_tokenizers import KINDS, write_folder

SMALL = {"max_num_seqs": 8, "check_invariants": True, "engine_process": False}
TEXTS = [
    "Hello, my name is",
    "2+3=",
    "  The   capital of\n\nFrance is\t",
    "Привет, мир! 你好，世界。cafe\u0301 👩‍👩‍👧‍👦🏳️‍🌈",
    "<|im_start|>user\nWhat is 12345 + 6?<|im_end|>\n<|im_start|>assistant\n",
    "今天天气很好" * 20,
]
LONG = "The quick brown fox jumps over the lazy dog, and then it sleeps for a while. " * 6


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **changes})


async def pieces_of(prompt, places: list[int]):
    for start, end in itertools.pairwise([0, *sorted(places), len(prompt)]):
        yield prompt[start:end]
        await asyncio.sleep(0)


async def last_of(stream) -> RequestOutput:
    last = None
    async for one in stream:
        last = one
    return last


def facts(output: RequestOutput, *, is_close: bool = False) -> Any:
    """Everything but what may differ: the number of the request, and how much came from the cache."""
    outputs = [dataclasses.asdict(one) for one in output.outputs]
    if is_close:
        for one in outputs:
            one["cumulative_logprob"] = one["logprobs"] = None
    return output.prompt, output.prompt_token_ids, outputs


def run(scenario, **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(300), AsyncLLM(**{**SMALL, **options}) as engine:
            await scenario(engine)
            statistics = await engine.statistics()
            assert (statistics["num_requests_running"], statistics["num_blocks_held"]) == (0, 0)

    asyncio.run(main())


def test_every_cut_of_short_texts():
    async def scenario(engine: AsyncLLM) -> None:
        for text in TEXTS[:5]:
            params = greedy(max_tokens=3)
            whole = facts(await last_of(engine.generate(text, params)))
            streams = [engine.generate(pieces_of(text, [place]), params) for place in range(len(text) + 1)]
            for output in await asyncio.gather(*map(last_of, streams)):
                assert facts(output) == whole

    run(scenario)


@pytest.mark.parametrize("kind", [*KINDS, "embedded"])
def test_random_cuts_with_other_tokenizers(tmp_path: Path, kind: str):
    options: dict[str, Any] = {}
    if kind != "embedded":
        make_checkpoint(tmp_path, "llama", vocab_size=512, max_position_embeddings=1024)
        write_folder(tmp_path, KINDS[kind]())
        options = {"model": str(tmp_path), "enable_prefix_caching": False}

    async def scenario(engine: AsyncLLM) -> None:
        pick = random.Random(7)
        for text in [*TEXTS, "a <tool call> b <s> c"]:
            whole = facts(await last_of(engine.generate(text, greedy())))
            cuts = [[pick.randrange(len(text)) for _ in range(pick.randrange(1, 9))] for _ in range(3)]
            streams = [engine.generate(pieces_of(text, places), greedy()) for places in [*cuts, list(range(len(text)))]]
            for output in await asyncio.gather(*map(last_of, streams)):
                assert facts(output) == whole

    run(scenario, **options)


WAYS = {
    "n": greedy(n=3),
    "seeded": SamplingParams(n=2, seed=5, max_tokens=8),
    "stop": greedy(max_tokens=30, stop=["e"]),
    "logprobs": greedy(logprobs=2),
    "prompt_logprobs": greedy(prompt_logprobs=1),
    "penalties": greedy(repetition_penalty=1.3, presence_penalty=0.5, min_tokens=5),
    "beams": BeamSearchParams(beam_width=3, max_tokens=6),
    "to the end": greedy(max_tokens=None, min_tokens=1),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_decoding(way):
    async def scenario(engine: AsyncLLM) -> None:
        params = WAYS[way]
        whole = await last_of(engine.generate(LONG, params))
        for size in (10, 200):
            places = list(range(size, len(LONG), size))
            streamed = await last_of(engine.generate(pieces_of(LONG, places), params))
            # log-probabilities of other chunks may differ in their last digits
            assert facts(streamed, is_close=True) == facts(whole, is_close=True)
            if way == "prompt_logprobs":
                assert len(streamed.prompt_logprobs) == len(whole.prompt_logprobs)
                for one, other in zip(streamed.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
                    assert one.keys() == other.keys()
                    for token in one:
                        assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)

    run(scenario, max_model_len=384, max_num_batched_tokens=64)


def test_the_same_numbers_without_a_seed():
    """The seed follows from the number of the request, which does not depend on how its prompt came."""

    async def of(streamed: bool) -> list[Any]:
        async with AsyncLLM(**SMALL) as engine:
            found = []
            for _ in range(2):
                prompt = pieces_of("a <tool c", [3, 5]) if streamed else "a <tool c"
                found.append(facts(await last_of(engine.generate(prompt, SamplingParams(n=2, max_tokens=8)))))
            return found

    whole, streamed = asyncio.run(of(False)), asyncio.run(of(True))
    assert whole == streamed
    assert whole[0] != whole[1]


def test_prefix_cache():
    async def scenario(engine: AsyncLLM) -> None:
        whole = await last_of(engine.generate(LONG, greedy()))
        streamed = await last_of(engine.generate(pieces_of(LONG, [300]), greedy()))
        assert facts(streamed) == facts(whole)
        assert streamed.num_cached_tokens > 0
        # what came in pieces is found by others
        other = LONG.upper()
        await last_of(engine.generate(pieces_of(other, [10, 100, 200]), greedy()))
        assert (await last_of(engine.generate(other, greedy()))).num_cached_tokens >= len(other) // 4

    run(scenario)


def test_preempted_in_the_middle_of_its_prompt():
    """Others need its blocks while it waits for more input; it comes back and is none the worse."""

    async def scenario(engine: AsyncLLM) -> None:
        text = LONG[:300]
        wanted = [facts(await last_of(engine.generate(prompt, greedy(max_tokens=20)))) for prompt in (text, text[::-1])]
        before = (await engine.statistics())["num_preemptions_total"]
        has_spoken, goes_on = asyncio.Event(), asyncio.Event()

        async def spoken():
            yield text[:200]
            has_spoken.set()
            await goes_on.wait()
            yield text[200:]

        task = asyncio.create_task(last_of(engine.generate(spoken(), greedy(max_tokens=20), priority=5)))
        await has_spoken.wait()
        others = [
            asyncio.create_task(last_of(engine.generate(text[::-1], greedy(max_tokens=20)))),
            asyncio.create_task(last_of(engine.generate("other " * 40, greedy(max_tokens=20)))),
        ]
        assert facts(await others[0]) == wanted[1]
        await others[1]
        goes_on.set()
        assert facts(await task) == wanted[0]
        assert (await engine.statistics())["num_preemptions_total"] > before

    run(scenario, max_model_len=320, num_gpu_blocks_override=22, enable_prefix_caching=False)


def test_many_at_once_some_of_whom_leave():
    async def scenario(engine: AsyncLLM) -> None:
        pick = random.Random(11)
        wanted = facts(await last_of(engine.generate(LONG, greedy())))

        async def one(leaves: bool) -> None:
            places = [pick.randrange(len(LONG)) for _ in range(12)]
            stream = engine.generate(pieces_of(LONG, places), greedy())
            if not leaves:
                assert facts(await last_of(stream)) == wanted
                return
            task = asyncio.create_task(last_of(stream))
            for _ in range(pick.randrange(1, 30)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one(number % 3 == 0) for number in range(18)))

    run(scenario)


def test_in_a_process_of_its_own():
    async def scenario(engine: AsyncLLM) -> None:
        whole = facts(await last_of(engine.generate(LONG, greedy())))
        streams = [
            engine.generate(pieces_of(LONG, list(range(size, len(LONG), size))), greedy()) for size in (1, 7, 90)
        ]
        assert [facts(output) for output in await asyncio.gather(*map(last_of, streams))] == [whole] * 3

    run(scenario, engine_process=True)
