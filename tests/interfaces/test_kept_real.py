"""Pinned prefixes and sessions with the embedded model and the real core, in float32: what is kept changes no token."""

import asyncio
import json

import pytest

from quire import LLM, AsyncLLM, OptionError, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# 24 blocks of 8 tokens: three requests of the greatest length
TINY = {"dtype": "float32", "max_num_seqs": 4, "block_size": 8, "num_gpu_blocks_override": 24, "max_model_len": 64}
CHECKED = {**TINY, "check_invariants": True, "swap_space": 0}
PREFIX = "Quire keeps the keys and values of a sequence in blocks, which need not be neighbours."
FLOOD = [f"Number {number} of many prompts that have nothing in common with it." for number in range(40)]


@pytest.fixture(scope="module")
def stateless():
    """Tokens in, tokens out; everything is computed anew."""
    with LLM(dtype="float32", max_num_seqs=4, enable_prefix_caching=False) as llm:

        def tokens(prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
            [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            return output.outputs[0].token_ids

        yield tokens


@pytest.fixture
def llm():
    with LLM(**CHECKED) as one:
        yield one
        # whoever gave up all that was kept finds nothing held
        assert one.statistics()["num_blocks_held"] == 0


def ids(llm: LLM, text: str) -> list[int]:
    return llm.renderer.encode(text)


# ---------------------------------------------------------------------------------------------- pinned prefixes


def test_a_prefix_is_used_to_its_last_token_and_survives_a_flood(llm, stateless):
    pinned = llm.pin_prefix(PREFIX, "p")
    assert pinned.num_tokens == len(ids(llm, PREFIX))
    assert pinned.num_tokens % 8, "the last block is to be partly filled"
    assert llm.memory().slots["pinned"] == pinned.num_tokens
    for number, question in enumerate([" Why?", " Since when?", " Why?"]):
        [output] = llm.generate(PREFIX + question, GREEDY, use_tqdm=False)
        assert output.num_cached_tokens >= pinned.num_tokens
        assert output.outputs[0].token_ids == stateless(output.prompt_token_ids)
        assert llm.pinned_prefixes()[0].num_hits == number + 1
        before = llm.statistics()["num_blocks_evicted_total"]
        llm.generate(FLOOD, GREEDY, use_tqdm=False)
        assert llm.statistics()["num_blocks_evicted_total"] > before
    llm.unpin_prefix("p")


def test_what_is_not_pinned_does_not_survive(llm):
    llm.pin_prefix(PREFIX, "p")
    llm.unpin_prefix("p")
    llm.generate(FLOOD, GREEDY, use_tqdm=False)
    [output] = llm.generate(PREFIX + " Why?", GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_many_prompts_share_it_at_once(llm, stateless):
    pinned = llm.pin_prefix(PREFIX)
    outputs = llm.generate(
        [PREFIX + word for word in (" One", " Two", " Three", " Four", " Five")], GREEDY, use_tqdm=False
    )
    for output in outputs:
        assert output.num_cached_tokens >= pinned.num_tokens
        assert output.outputs[0].token_ids == stateless(output.prompt_token_ids)
    llm.unpin_prefix("prefix-1")


def test_the_cache_may_be_reset_but_not_the_prefix(llm):
    pinned = llm.pin_prefix(PREFIX, "p")
    llm.control("reset_prefix_cache")
    [output] = llm.generate(PREFIX + " Why?", GREEDY, use_tqdm=False)
    assert output.num_cached_tokens >= pinned.num_tokens
    llm.unpin_prefix("p")


def test_what_does_not_fit_beside_the_others_is_refused(llm):
    def pin_until_refused(names: list[str]) -> None:
        for number in range(10):
            names.append(llm.pin_prefix([5 + number] * 60).name)

    names: list[str] = []
    with pytest.raises(RequestError, match="cannot be pinned"):
        pin_until_refused(names)
    assert 1 <= len(names) < 4
    assert llm.statistics()["num_kept_sequences"] == len(names)
    # the engine still serves the longest request
    [output] = llm.generate({"prompt_token_ids": [3] * 56}, GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    for name in names:
        llm.unpin_prefix(name)


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "process"])
def test_a_start_up_file(tmp_path, own_process: bool):
    file = tmp_path / "prefixes.json"
    good = {"name": "rules", "messages": [{"role": "system", "content": "Be brief."}]}
    file.write_text(json.dumps([good]))
    options = {**TINY, "engine_process": own_process, "pinned_prefixes": str(file)}

    async def main() -> None:
        async with asyncio.timeout(120), AsyncLLM(**options) as engine:
            [pinned] = await engine.pinned_prefixes()
            chat = [*good["messages"], {"role": "user", "content": "What is a block?"}]
            prompt = engine.renderer.render_prompt(chat)
            output = [output async for output in engine.generate(prompt, GREEDY)][-1]
            assert pinned.num_tokens <= output.num_cached_tokens < len(prompt.token_ids)
        file.write_text(json.dumps([good, {"name": "long", "token_ids": [5] * 64}]))
        async with asyncio.timeout(120):
            with pytest.raises(OptionError, match="prefix 'long' cannot be pinned"):
                await AsyncLLM(**options).start()

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------- sessions


def computed(llm: LLM) -> float:
    statistics = llm.statistics()
    return statistics["num_prefix_queried_tokens_total"] - statistics["num_prefix_hit_tokens_total"]


def test_three_turns_compute_only_what_is_new(llm, stateless):
    with llm.open_session() as session:
        for turn, text in enumerate(["Once upon a time", " in a wood", " there was"]):
            size, before = session.num_tokens, computed(llm)
            output = session.generate(text, GREEDY)
            # the last token of the turn before was sampled, not computed
            assert output.num_cached_tokens == max(0, size - 1)
            assert computed(llm) - before == len(output.prompt_token_ids) + (turn > 0)
            assert output.outputs[0].token_ids == session.token_ids[-8:] == stateless(session.token_ids[:-8])


def test_a_session_needs_no_prefix_cache(stateless):
    with LLM(**CHECKED, enable_prefix_caching=False) as llm, llm.open_session() as session:
        for text in ("Once upon a time", " in a wood"):
            session.generate(text, GREEDY)
            assert session.token_ids[-8:] == stateless(session.token_ids[:-8])


def test_forks_and_rewinds_equal_resending(llm, stateless):
    with llm.open_session() as session:
        session.generate("The quick brown fox", GREEDY)
        past = session.token_ids
        with session.fork() as fork:
            fork.rewind(len(past) - 3)
            assert llm.memory().num_blocks_saved_by_sharing >= 0
            for one, text, start in ((session, " jumps over", past), (fork, " sleeps", past[:-3])):
                one.generate(text, GREEDY)
                assert one.token_ids[: len(start)] == start
                assert one.token_ids[-8:] == stateless(one.token_ids[:-8])
        session.rewind(1)
        session.generate("", GREEDY)
        assert session.token_ids[1:] == stateless(past[:1])


def test_a_session_under_memory_pressure_keeps_its_tokens(llm, stateless):
    with llm.open_session() as session:
        session.generate("Once upon a time", GREEDY)
        llm.generate(FLOOD, GREEDY, use_tqdm=False)
        session.generate(" again", GREEDY)
        assert session.token_ids[-8:] == stateless(session.token_ids[:-8])


def test_a_stop_string_leaves_what_was_seen(llm, stateless):
    with llm.open_session() as session:
        text = session.generate("Count: one, two, three,", GREEDY.replace(max_tokens=24)).outputs[0].text
        session.rewind(0)
        middle = len(text) // 2
        stop = text[middle : middle + 3]
        output = session.generate("Count: one, two, three,", GREEDY.replace(max_tokens=24, stop=[stop])).outputs[0]
        assert output.stop_reason == stop
        kept = session.token_ids
        assert llm.renderer.decode(kept).endswith("three," + text[: text.index(stop)])
        session.generate(" and", GREEDY)
        assert session.token_ids[: len(kept)] == kept
        assert session.token_ids[-8:] == stateless(session.token_ids[:-8])


def test_sessions_take_turns_side_by_side(stateless):
    async def talk(engine: AsyncLLM, start: str) -> list[int]:
        async with await engine.open_session() as session:
            for text in (start, " and then", " at last"):
                output = await session.generate(text, GREEDY)
                assert output.outputs[0].finish_reason == "length"
            return session.token_ids

    async def main() -> list[list[int]]:
        async with asyncio.timeout(120), AsyncLLM(engine_process=False, **CHECKED) as engine:
            found = await asyncio.gather(*(talk(engine, start) for start in ("A cat", "Two dogs", "No bird", "A fox")))
            assert (await engine.statistics())["num_blocks_held"] == 0
            return found

    for token_ids in asyncio.run(main()):
        assert token_ids[-8:] == stateless(token_ids[:-8])


def test_a_prefix_without_room_is_refused_in_the_words_of_its_call(llm):
    llm.pin_prefix([5] * 63, "a")
    llm.pin_prefix([6] * 63, "b")
    with pytest.raises(RequestError, match="Unpin something or give the KV cache more memory") as caught:
        llm.pin_prefix([7] * 63, "c")
    assert not any(word in str(caught.value) for word in ("pin:", "max_tokens", "handle", "accepted"))
    for name in "ab":
        llm.unpin_prefix(name)


def test_swap_space_without_room_for_a_block_is_reported():
    with LLM(**{**TINY, "preemption_mode": "swap", "swap_space": 1e-6}) as llm:
        assert any("no swap space: it has no room for a block" in line for line in llm._engine.ready.report)
