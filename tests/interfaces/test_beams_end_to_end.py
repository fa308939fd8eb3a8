"""Beams with the embedded model and the real core, through LLM and AsyncLLM. HTTP: server/test_openai_client.py."""

import asyncio
import math
from itertools import pairwise

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, RequestError, SamplingParams
from quire.worker.kernels import cpu

PROMPTS = ["The capital of France is", "2+3=", "Count to ten: one, two,"]
BEAMS = BeamSearchParams(beam_width=4, max_tokens=10, logprobs=0)
# of ten tokens in bfloat16; torch's own kernels round by the size of the batch
SAME = 1e-3 if cpu.load() else 0.2
SMALL = {"max_num_seqs": 16, "check_invariants": True}


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as one:
        yield one


def chosen(logprobs) -> list[float]:
    return [next(iter(position.values())).logprob for position in logprobs]


def test_scores_follow_from_the_tokens(llm: LLM):
    for output in llm.beam_search(PROMPTS, BEAMS, use_tqdm=False):
        assert len(output.sequences) == 4
        assert len({tuple(one.tokens) for one in output.sequences}) == 4
        assert all(better.score >= worse.score for better, worse in pairwise(output.sequences))
        for one in output.sequences:
            new = one.tokens[len(output.prompt_token_ids) :]
            assert [next(iter(position)) for position in one.logprobs] == new
            assert sum(chosen(one.logprobs)) == pytest.approx(one.cum_logprob)
            assert one.score == pytest.approx(one.cum_logprob / len(new))
            is_ended = new[-1] in llm.renderer.eos_token_ids
            assert one.finish_reason == ("stop" if is_ended else "length")
            assert len(new) == 10 or is_ended
            assert one.text == llm.renderer.decode(one.tokens)
    assert llm.statistics()["num_blocks_held"] == 0


def test_the_model_says_the_same_of_a_beam_read_as_a_prompt(llm: LLM):
    outputs = llm.beam_search(PROMPTS, BEAMS, use_tqdm=False)
    reads = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for output in outputs:
        for one in output.sequences:
            [read] = llm.generate({"prompt_token_ids": one.tokens}, reads, use_tqdm=False)
            positions = read.prompt_logprobs[len(output.prompt_token_ids) :]
            assert sum(chosen(positions)) == pytest.approx(one.cum_logprob, abs=SAME)


def test_one_beam_is_greedy(llm: LLM):
    [beam] = llm.beam_search(PROMPTS[0], BEAMS.replace(beam_width=1), use_tqdm=False)
    [greedy] = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=10), use_tqdm=False)
    [one] = beam.sequences
    assert one.tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids
    assert one.output_text == greedy.outputs[0].text


def test_a_wide_search_finds_nothing_worse_without_an_end(llm: LLM):
    """All hypotheses have the same length, so the best of eight beams cannot lose against greedy."""
    params = BEAMS.replace(beam_width=8, ignore_eos=True)
    for prompt in PROMPTS:
        [wide] = llm.beam_search(prompt, params, use_tqdm=False)
        [greedy] = llm.beam_search(prompt, params.replace(beam_width=1), use_tqdm=False)
        assert wide.sequences[0].cum_logprob >= greedy.sequences[0].cum_logprob - 1e-4
        assert {one.finish_reason for one in wide.sequences} == {"length"}


def test_beams_mix_with_samples_in_one_call(llm: LLM):
    kinds = [BEAMS, SamplingParams(temperature=0.0, max_tokens=10), SamplingParams(n=3, seed=4, max_tokens=10)]
    prompts = [prompt for prompt in PROMPTS for _ in kinds]
    together = llm.generate(prompts, kinds * len(PROMPTS), use_tqdm=False)
    alone = [
        llm.generate(prompt, kind, use_tqdm=False)[0]
        for prompt, kind in zip(prompts, kinds * len(PROMPTS), strict=True)
    ]
    for ours, expected in zip(together, alone, strict=True):
        assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in expected.outputs]
        assert [one.finish_reason for one in ours.outputs] == [one.finish_reason for one in expected.outputs]
    beams = together[0].outputs
    assert all(one.cumulative_logprob == pytest.approx(sum(chosen(one.logprobs))) for one in beams)
    assert llm.statistics()["num_blocks_held"] == 0


def test_groups_set_beams_apart(llm: LLM):
    params = BEAMS.replace(num_beam_groups=2, diversity_penalty=50.0)
    [output] = llm.beam_search(PROMPTS[0], params, use_tqdm=False)
    num_prompt = len(output.prompt_token_ids)
    assert len({one.tokens[num_prompt] for one in output.sequences}) > 1
    for one in output.sequences:
        # the penalty orders a group's choices, and does not stay in the sum
        assert sum(chosen(one.logprobs)) == pytest.approx(one.cum_logprob)


def test_a_stop_token_ends_a_beam(llm: LLM):
    [plain] = llm.beam_search(PROMPTS[0], BEAMS.replace(ignore_eos=True), use_tqdm=False)
    token = plain.sequences[0].tokens[len(plain.prompt_token_ids) + 3]
    params = BEAMS.replace(ignore_eos=True, stop_token_ids=[token], length_penalty=0.0)
    [output] = llm.beam_search(PROMPTS[0], params, use_tqdm=False)
    ended = [one for one in output.sequences if one.finish_reason == "stop"]
    assert ended
    assert all((one.stop_reason, one.tokens[-1]) == (token, token) for one in ended)


def test_a_search_that_can_never_fit_is_refused_with_numbers():
    wide = BEAMS.replace(beam_width=16, max_tokens=40, ignore_eos=True)
    with LLM(kv_cache_memory_bytes="512KiB", max_model_len=64, **SMALL) as small:
        refused, narrow = small.beam_search(["a " * 20] * 2, [wide, wide.replace(beam_width=2)], use_tqdm=False)
    assert [one.finish_reason for one in refused.sequences] == ["error"] * 16
    assert all("blocks of 16 tokens, the engine has" in str(one.stop_reason) for one in refused.sequences)
    assert {one.score for one in refused.sequences} == {-math.inf}
    assert [one.finish_reason for one in narrow.sequences] == ["length"] * 2


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "process"])
def test_streams_end_as_the_whole_does(llm: LLM, own_process: bool):
    expected = llm.beam_search(PROMPTS, BEAMS, use_tqdm=False)

    async def check(engine: AsyncLLM, prompt: str, whole) -> None:
        parts: list[list] = [[] for _ in whole.sequences]
        async for delta in engine.stream(prompt, BEAMS):
            parts[delta.index].append(delta)
        for one, deltas in zip(whole.sequences, parts, strict=True):
            assert "".join(delta.text for delta in deltas) == one.output_text
            assert [token for delta in deltas for token in delta.token_ids] == one.tokens[len(whole.prompt_token_ids) :]
            assert sum(delta.cumulative_logprob or 0.0 for delta in deltas) == pytest.approx(one.cum_logprob, abs=1e-3)
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (one.finish_reason, one.stop_reason)

    async def main() -> None:
        async with asyncio.timeout(120), AsyncLLM(engine_process=own_process, **SMALL) as engine:
            await asyncio.gather(*(check(engine, *pair) for pair in zip(PROMPTS, expected, strict=True)))
            found = await engine.beam_search(PROMPTS[0], BEAMS)
            assert [one.tokens for one in found.sequences] == [one.tokens for one in expected[0].sequences]
            # a reader that leaves frees all beams
            stream = engine.stream(PROMPTS[0], BEAMS)
            await anext(stream)
            await stream.aclose()
            statistics = await engine.statistics()
            assert (statistics["num_requests_running"], statistics["num_blocks_held"]) == (0, 0)
            with pytest.raises(RequestError, match="beam_width=17: at most 16"):
                await engine.beam_search(PROMPTS[0], BEAMS.replace(beam_width=17))

    asyncio.run(main())
