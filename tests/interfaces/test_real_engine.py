"""LLM and AsyncLLM with the embedded model and the real core: the same answers on every way, nothing left behind."""

import asyncio
import contextlib
import logging
import subprocess
import sys

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.errors import QuireError

PROMPTS = ["2+3=", "The capital of France is", "Count to ten: one, two,"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SMALL = {"max_num_seqs": 8, "check_invariants": True}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SMALL) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
        assert together == alone
        assert llm.statistics()["num_blocks_held"] == 0
    return together


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "process"])
def test_streams_give_what_a_batch_gives(expected: list[list[int]], own_process: bool):
    async def tokens_of(engine: AsyncLLM, prompt: str) -> list[int]:
        return [token async for delta in engine.stream(prompt, GREEDY) for token in delta.token_ids]

    async def main() -> None:
        async with asyncio.timeout(120), AsyncLLM(engine_process=own_process, **SMALL) as engine:
            assert await asyncio.gather(*(tokens_of(engine, prompt) for prompt in PROMPTS)) == expected
            # readers that leave free their memory
            for _ in range(4):
                async with contextlib.aclosing(engine.stream("a", SamplingParams(n=3, ignore_eos=True))) as stream:
                    await anext(stream)
            statistics = await engine.statistics()
            assert (statistics["num_requests_running"], statistics["num_blocks_held"]) == (0, 0)

    asyncio.run(main())


def test_a_seed_makes_sampling_repeatable():
    sampling = SamplingParams(n=2, seed=11, max_tokens=12, ignore_eos=True)
    with LLM(**SMALL) as llm:
        first, again = llm.generate([PROMPTS[0]] * 2, sampling, use_tqdm=False)
        [alone] = llm.generate(PROMPTS[0], sampling, use_tqdm=False)
    texts = [[one.text for one in output.outputs] for output in (first, again, alone)]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] != texts[0][1]


@pytest.mark.parametrize("num_samples", [1, 2])
def test_one_that_loses_its_rows_to_an_urgent_one_reports_everything_once(num_samples: int):
    """It is computed again from the prompt on; neither its prompt's scores nor its tokens come twice."""
    ids = list(range(20, 50))
    sampling = SamplingParams(
        temperature=0.0, max_tokens=60, prompt_logprobs=0, logprobs=0, ignore_eos=True, n=num_samples
    )

    async def low(engine: AsyncLLM, has_begun: asyncio.Event):
        outputs = []
        async for output in engine.generate({"prompt_token_ids": ids}, sampling, priority=5):
            outputs.append(output)
            has_begun.set()
        return outputs[-1]

    async def main() -> None:
        options = {**SMALL, "max_num_seqs": num_samples, "async_scheduling": True, "engine_process": False}
        async with asyncio.timeout(120), AsyncLLM(**options) as engine:
            alone = await low(engine, asyncio.Event())
            has_begun = asyncio.Event()
            pushed_out = asyncio.create_task(low(engine, has_begun))
            await has_begun.wait()
            urgent = engine.generate({"prompt_token_ids": [60, 61]}, SamplingParams(max_tokens=2, ignore_eos=True))
            assert [output async for output in urgent][-1].finished
            assert not pushed_out.done(), "it went before"
            output = await pushed_out
            assert (await engine.statistics())["num_preemptions_total"] >= 1
            assert output.prompt_logprobs == alone.prompt_logprobs
            assert len(output.prompt_logprobs) == len(ids)
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in alone.outputs]
            assert [len(one.logprobs) for one in output.outputs] == [60] * num_samples

    asyncio.run(main())


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_program_that_never_shuts_down_ends(runs_ahead: bool):
    """An engine in a global variable: its worker's thread must be asked to end while it can still answer."""
    program = (
        "from quire import LLM, SamplingParams\n"
        f"llm = LLM(async_scheduling={runs_ahead}, max_num_seqs=2)\n"
        "print(len(llm.generate('Hello', SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids))\n"
        "import os, sys; sys.stdout.flush()\n"
        "child = os.fork()\n"  # it ends as a program does, and has no thread but this one
        "child and os.waitpid(child, 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "3\n"), ended.stderr


def test_what_was_decided_can_be_read_afterwards(expected: list[list[int]]):
    async def main() -> None:
        async with AsyncLLM(engine_process=True, **SMALL) as engine:
            for prompt in PROMPTS:
                _ = [delta async for delta in engine.stream(prompt, GREEDY)]
            recording = await engine.recording()
            assert [one.kind for one in recording.decisions if one.request == recording.decisions[0].request] == [
                "arrived",
                "started",
                "ended",
            ]
            num_computed = sum(int(step.num_tokens.sum()) for step in recording.steps)
            # the last token of an answer is never computed
            assert num_computed >= sum(map(len, expected)) - len(expected)
            times = [step.began for step in recording.steps]
            assert times == sorted(times)
        async with AsyncLLM(engine_process=True, recorder_bytes=0, **SMALL) as silent:
            with pytest.raises(QuireError, match="recorder_bytes=0"):
                await silent.recording()

    asyncio.run(main())


@pytest.mark.parametrize("is_told_later", [False, True], ids=["at_the_start", "later"])
def test_the_engines_process_logs_as_much_as_whoever_started_it_wants(is_told_later, capfd, monkeypatch):
    """Why a request gave way stands there at level debug."""
    monkeypatch.setattr(logging.getLogger("quire"), "level", logging.WARNING if is_told_later else logging.DEBUG)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
    options = {**SMALL, "num_gpu_blocks_override": 12, "max_model_len": 128, "engine_process": True}

    async def main() -> None:
        async def answered(engine: AsyncLLM, token_id: int) -> None:
            async for _ in engine.generate({"prompt_token_ids": [token_id] * 30}, sampling):
                pass

        async with asyncio.timeout(120), AsyncLLM(**options) as engine:
            if is_told_later:
                await engine.control("set_log_level", {"level": logging.DEBUG})
            await asyncio.gather(*(answered(engine, 60 + number) for number in range(6)))
            assert (await engine.statistics())["num_preemptions_total"] >= 1
            logged = ""
            # the log is written in the background
            while "DEBUG   quire.scheduler: preempted request" not in logged:
                await asyncio.sleep(0.01)
                logged += capfd.readouterr().err

    asyncio.run(main())
