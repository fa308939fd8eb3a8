"""Beams over a core without a search: shapes, order, streams, and what they share with sampling."""

import asyncio
import contextlib
from itertools import pairwise

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, RequestError, RequestFailedError, SamplingParams
from quire.testing.fake_beams import logprob_of_tail
from quire.testing.fake_llm import fake_async_llm, fake_llm, fake_renderer

PROMPT = "one two three"
BEAMS = BeamSearchParams(beam_width=3, max_tokens=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
LINKS = pytest.mark.parametrize("own_process", [False, True], ids=["in process", "socket"])


def ids(text: str) -> list[int]:
    return fake_renderer().render_prompt(text).token_ids


def sum_of(index: int) -> float:
    """What the fake gives to output `index` of eight tokens: four are settled, four are its own."""
    return 4 * -0.5 + 4 * logprob_of_tail(index)


@pytest.fixture
def llm():
    with fake_llm() as one:
        yield one


# ---------------------------------------------------------------------------------------------- LLM


@LINKS
def test_sequences_come_best_first_with_their_prompt(own_process: bool):
    with fake_llm(own_process=own_process) as llm:
        [output] = llm.beam_search(PROMPT, BEAMS, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == (PROMPT, ids(PROMPT))
    assert len(output.sequences) == 3
    for index, one in enumerate(output.sequences):
        assert one.tokens[: len(ids(PROMPT))] == ids(PROMPT)
        assert len(one.tokens) == len(ids(PROMPT)) + 8
        assert one.text == fake_renderer().decode(one.tokens)
        assert one.text.startswith(PROMPT)
        assert one.output_text == one.text.removeprefix(PROMPT)
        assert one.cum_logprob == pytest.approx(sum_of(index))
        assert one.score == pytest.approx(sum_of(index) / 8)
        assert one.logprobs is None
    assert [one.finish_reason for one in output.sequences] == ["stop", "length", "length"]
    assert all(better.score > worse.score for better, worse in pairwise(output.sequences))


def test_the_end_token_is_a_token_and_no_text(llm: LLM):
    [output] = llm.beam_search(PROMPT, BEAMS, use_tqdm=False)
    [shown] = llm.beam_search(PROMPT, BEAMS.replace(skip_special_tokens=False), use_tqdm=False)
    end = fake_renderer().eos_token_ids[0]
    assert output.sequences[0].tokens[-1] == shown.sequences[0].tokens[-1] == end
    assert shown.sequences[0].text == output.sequences[0].text + fake_renderer().token_text(end)


def test_a_stop_token_is_named(llm: LLM):
    [output] = llm.beam_search(PROMPT, BEAMS.replace(stop_token_ids=[9]), use_tqdm=False)
    assert [one.stop_reason for one in output.sequences] == [None, 9, None]
    assert [one.finish_reason for one in output.sequences] == ["stop", "stop", "length"]


def test_the_length_penalty_decides_the_score(llm: LLM):
    [output] = llm.beam_search(PROMPT, BEAMS.replace(length_penalty=2.0), use_tqdm=False)
    assert output.sequences[0].score == pytest.approx(sum_of(0) / 64)


def test_fewer_are_returned_if_fewer_are_asked_for(llm: LLM):
    [output] = llm.beam_search(PROMPT, BEAMS.replace(num_return_sequences=2), use_tqdm=False)
    assert len(output.sequences) == 2


def test_logprobs_are_there_if_they_were_asked_for(llm: LLM):
    [output] = llm.beam_search(PROMPT, BEAMS.replace(logprobs=2), use_tqdm=False)
    for one in output.sequences:
        chosen = [next(iter(position)) for position in one.logprobs]
        assert chosen == one.tokens[-8:]
        assert [len(position) for position in one.logprobs] == [2] * 8
        assert sum(next(iter(position.values())).logprob for position in one.logprobs) == pytest.approx(one.cum_logprob)
    [output] = llm.beam_search(PROMPT, BEAMS.replace(logprobs=0), use_tqdm=False)
    assert [len(position) for position in output.sequences[0].logprobs] == [1] * 8


def test_every_form_of_a_prompt_one_or_many(llm: LLM):
    forms = [PROMPT, {"prompt": PROMPT}, {"prompt_token_ids": ids(PROMPT)}, ids(PROMPT)]
    outputs = llm.beam_search(forms, BEAMS, use_tqdm=False)
    assert [output.prompt for output in outputs] == [PROMPT, PROMPT, None, None]
    assert [output.sequences for output in outputs] == [outputs[0].sequences] * 4
    assert llm.beam_search({"prompt_token_ids": ids(PROMPT)}, BEAMS, use_tqdm=False) == [outputs[2]]
    assert llm.beam_search([], BEAMS) == []


def test_parameters_for_each_prompt(llm: LLM):
    outputs = llm.beam_search([PROMPT, "four"], [BEAMS, BEAMS.replace(beam_width=1, max_tokens=2)], use_tqdm=False)
    assert [len(output.sequences) for output in outputs] == [3, 1]
    assert len(outputs[1].sequences[0].tokens) == len(ids("four")) + 2


def test_beams_and_samples_mix_in_one_call(llm: LLM):
    beams, greedy, sampled = llm.generate(
        [PROMPT] * 3, [BEAMS, GREEDY, SamplingParams(n=2, seed=1, max_tokens=5)], use_tqdm=False
    )
    assert [one.cumulative_logprob for one in beams.outputs] == pytest.approx([sum_of(index) for index in range(3)])
    assert [one.logprobs for one in beams.outputs] == [None] * 3
    assert greedy.outputs[0].token_ids == (ids(PROMPT) * 4)[:4]
    assert greedy.outputs[0].cumulative_logprob is None
    assert len(sampled.outputs) == 2
    assert all(output.finished for output in (beams, greedy, sampled))


def test_the_bar_counts_all_outputs(llm: LLM):
    class Bar:
        def __init__(self, total, desc):
            self.total, self.count, self.text = total, 0, ""

        def set_postfix_str(self, text, refresh):
            self.text = text

        def update(self, count):
            self.count += count

        def close(self):
            bars.append(self)

    bars: list[Bar] = []
    llm.beam_search([PROMPT, PROMPT], BEAMS, use_tqdm=Bar)
    assert [(bar.total, bar.count) for bar in bars] == [(2, 2)]
    assert "output" in bars[0].text


@pytest.mark.parametrize("params", [None, GREEDY, [BEAMS, GREEDY], {"beam_width": 3}])
def test_other_parameters_are_refused(llm: LLM, params):
    with pytest.raises(RequestError, match="must be BeamSearchParams") as caught:
        llm.beam_search([PROMPT, PROMPT], params)
    assert caught.value.param == "params"


def test_a_width_that_the_engine_has_no_room_for():
    with fake_llm(max_num_seqs=4) as llm:
        with pytest.raises(RequestError, match="beam_width=5: at most 4 sequences") as caught:
            llm.beam_search(["good", PROMPT], [BEAMS, BEAMS.replace(beam_width=5)])
        assert "prompt number 1 " in caught.value.__notes__[0]
        assert llm.statistics()["steps"] == 0


# ---------------------------------------------------------------------------------------------- AsyncLLM


def run(scenario, own_process: bool = False) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), fake_async_llm(own_process=own_process) as engine:
            await scenario(engine)

    asyncio.run(main())


@LINKS
def test_streams_add_up_to_the_whole(own_process: bool):
    async def scenario(engine: AsyncLLM) -> None:
        whole = await engine.beam_search(PROMPT, BEAMS.replace(logprobs=1))
        parts: list[list] = [[], [], []]
        async for delta in engine.stream(PROMPT, BEAMS.replace(logprobs=1)):
            parts[delta.index].append(delta)
        for one, deltas in zip(whole.sequences, parts, strict=True):
            assert "".join(delta.text for delta in deltas) == one.output_text
            assert [token for delta in deltas for token in delta.token_ids] == one.tokens[-8:]
            assert [position for delta in deltas for position in delta.logprobs or []] == one.logprobs
            assert sum(delta.cumulative_logprob or 0.0 for delta in deltas) == pytest.approx(one.cum_logprob)
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].finish_reason == one.finish_reason

    run(scenario, own_process)


def test_what_is_settled_is_there_before_the_end():
    async def scenario(engine: AsyncLLM) -> None:
        await engine.control("hold", {"at": 2})
        stream = engine.generate(PROMPT, BEAMS, "mine")
        async for output in stream:
            if all(len(one.token_ids) == 2 for one in output.outputs):
                break
        assert {one.text for one in output.outputs} == {fake_renderer().decode(ids(PROMPT)[:2])}
        assert [one.cumulative_logprob for one in output.outputs] == [-1.0] * 3
        assert not output.finished
        await engine.control("hold")
        async for output in stream:
            last = output
        assert last.finished
        assert last.request_id == "mine"
        assert [one.cumulative_logprob for one in last.outputs] == pytest.approx([sum_of(index) for index in range(3)])

    run(scenario)


def test_log_probabilities_are_shown_only_to_those_who_asked():
    async def scenario(engine: AsyncLLM) -> None:
        assert {delta.logprobs is None async for delta in engine.stream(PROMPT, BEAMS)} == {True}
        async for output in engine.generate(PROMPT, BEAMS, delta=True):
            [one] = output.outputs
            assert one.logprobs is None
            assert one.cumulative_logprob is not None

    run(scenario)


def test_a_prepared_request_for_beams_runs_beside_samples():
    async def scenario(engine: AsyncLLM) -> None:
        prepared = await engine.prepare(PROMPT, BEAMS)

        async def num_tokens(prompt, params=None) -> int:
            return sum([len(delta.token_ids) async for delta in engine.stream(prompt, params)])

        assert await asyncio.gather(num_tokens(prepared), num_tokens(PROMPT, GREEDY)) == [24, 4]

    run(scenario)


def test_a_reader_that_leaves_aborts_all_beams():
    async def scenario(engine: AsyncLLM) -> None:
        await engine.control("hold", {"at": 2})
        async with contextlib.aclosing(engine.stream(PROMPT, BEAMS)) as stream:
            await anext(stream)
        assert (await engine.statistics())["sequences_aborted"] == 3
        task = asyncio.create_task(engine.beam_search(PROMPT, BEAMS, "mine"))
        while (await engine.statistics())["sequences_running"] == 0:
            await asyncio.sleep(0)
        await engine.abort("mine")
        assert [one.finish_reason for one in (await task).sequences] == ["abort"] * 3
        assert engine.num_open_requests == 0

    run(scenario)


def test_a_failure_is_raised():
    async def scenario(engine: AsyncLLM) -> None:
        await engine.control("hold", {"at": 2})
        task = asyncio.create_task(engine.beam_search(PROMPT, BEAMS))
        while (await engine.statistics())["sequences_running"] == 0:
            await asyncio.sleep(0)
        await engine.control("fail_requests", {"error": "logits are not finite"})
        with pytest.raises(RequestFailedError, match="not finite"):
            await task
        with pytest.raises(RequestError, match="must be BeamSearchParams"):
            await engine.beam_search(PROMPT, GREEDY)

    run(scenario)
