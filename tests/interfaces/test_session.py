"""Sessions over a core without a model that keeps what it is told to keep; greedy sequences repeat their prompt."""

import asyncio
import contextlib
import signal

import numpy as np
import pytest

from quire import RequestError, SamplingParams
from quire.beam_search_params import BeamSearchParams
from quire.errors import ContextLengthError, EngineDeadError, RequestFailedError
from quire.testing.fake_kept import KEEPING_CORE
from quire.testing.fake_llm import fake_async_llm, fake_llm, fake_renderer

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
LINKS = pytest.mark.parametrize("own_process", [False, True], ids=["in process", "socket"])
STORY = "one two three four five six"


def tokens(text: str) -> list[int]:
    return fake_renderer().render_prompt(text).token_ids


def text_of(token_ids: list[int]) -> str:
    return fake_renderer().decode(token_ids)


def kept_in(llm) -> dict[str, int]:
    return {entry["handle"].partition("#")[0]: entry["num_tokens"] for entry in llm.control("list_kept")}


@pytest.fixture
def llm():
    with fake_llm(core=KEEPING_CORE) as one:
        yield one


@pytest.fixture
def session(llm):
    with llm.open_session("s") as one:
        yield one


@LINKS
def test_a_turn_computes_only_what_is_new(own_process: bool):
    with fake_llm(core=KEEPING_CORE, own_process=own_process) as llm, llm.open_session() as session:
        said = []
        for text in ("one two three", " four five", " six"):
            before = llm.statistics()["tokens_computed_total"]
            num_kept = session.num_tokens
            output = session.generate(text, GREEDY)
            new = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
            # the last token of a turn is not computed until the next one
            assert llm.statistics()["tokens_computed_total"] - before == new - (num_kept == 0)
            assert output.num_cached_tokens == max(0, num_kept - 1)
            assert (output.prompt, output.finished) == (text, True)
            said += output.prompt_token_ids + output.outputs[0].token_ids
            assert session.token_ids == said
        assert kept_in(llm) == {"kept:session-1": len(said)}
        # greedy sequences repeat their prompt from the beginning, and the prompt of a turn is the whole session
        assert said[-4:] == said[:4]


def test_a_text_in_the_middle_gets_no_special_tokens(llm, session, monkeypatch):
    seen = []
    encode = type(fake_renderer()._tokenizer).encode

    def spy(self, text, *, add_special_tokens):
        seen.append((text, add_special_tokens))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(type(fake_renderer()._tokenizer), "encode", spy)
    session.generate("one", GREEDY)
    session.generate(" two", GREEDY)
    session.rewind(0)
    session.generate("three", GREEDY)
    assert [flag for text, flag in seen if text in ("one", " two", "three")] == [True, False, True]


def test_a_salted_session_keeps_its_salt(llm):
    with llm.open_session(cache_salt="mine") as session, llm.open_session() as other:
        llm.pin_prefix(STORY, cache_salt="mine")
        assert session.generate(STORY + ".", GREEDY).num_cached_tokens == len(tokens(STORY))
        assert other.generate(STORY + ".", GREEDY).num_cached_tokens == 0
        size = session.num_tokens
        with session.fork() as fork:
            assert fork.generate(" and", GREEDY).num_cached_tokens == size - 1


def test_prompts_may_be_tokens_and_empty(llm, session):
    ids = tokens("one two three")
    session.generate(ids[:2], GREEDY)
    session.generate({"prompt_token_ids": ids[2:]}, GREEDY)
    size = session.num_tokens
    output = session.generate("", GREEDY)
    assert output.prompt_token_ids == []
    assert session.num_tokens == size + 4


def test_a_later_turn_knows_the_keys_of_a_prompt_too(session):
    session.generate("one", GREEDY)
    with pytest.raises(RequestError, match="'media' is not supported"):
        session.generate({"prompt": " two", "media": 1}, GREEDY)
    with pytest.raises(RequestError, match="cache_salt='mine': it belongs to the session"):
        session.generate({"prompt": " two", "cache_salt": "mine"}, GREEDY)


def test_an_empty_beginning_is_refused(session):
    with pytest.raises(RequestError, match="it has no tokens"):
        session.generate("", GREEDY)
    session.generate("one", GREEDY)


def test_a_character_may_be_cut_between_turns(session):
    ids = tokens("grüße 😀")
    # some token of the last character ends it; its beginning is the end of the first turn
    whole = next(end for end in range(len(ids), 0, -1) if "😀" not in text_of(ids[: end - 1]))
    output = session.generate(ids, SamplingParams(temperature=0.0, max_tokens=whole - 1))
    output = session.generate("", SamplingParams(temperature=0.0, max_tokens=1, min_tokens=1))
    assert "\ufffd" not in output.outputs[0].text


# ---------------------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize("include", [False, True], ids=["left out", "included"])
@pytest.mark.parametrize("stop", [" three", "hree", " t", "ree fo", "two three"])
def test_after_a_stop_string_the_kept_text_is_what_was_seen(llm, session, stop: str, include: bool):
    sampling = GREEDY.replace(max_tokens=40, stop=[stop], include_stop_str_in_output=include)
    output = session.generate(STORY + ".", sampling).outputs[0]
    assert output.stop_reason == stop
    assert text_of(session.token_ids) == STORY + "." + output.text
    session.generate(" Then", GREEDY)
    assert text_of(session.token_ids).startswith(STORY + "." + output.text + " Then")
    assert kept_in(llm) == {"kept:s": session.num_tokens}


def test_a_stop_string_that_the_core_has_overtaken(llm, session):
    """The core ends by length with the token that holds the stop string: it has kept too much."""
    first = tokens(STORY)[:1]
    output = session.generate(STORY, GREEDY.replace(max_tokens=1, stop=[text_of(first)])).outputs[0]
    assert (output.finish_reason, output.text, output.token_ids) == ("stop", "", first)
    size = session.num_tokens
    assert size == len(tokens(STORY)) == kept_in(llm)["kept:s"] - 1
    with session.fork("child") as child:
        assert kept_in(llm) == {"kept:s": size, "kept:child": size}
        assert child.token_ids == session.token_ids


def test_a_stop_token_is_kept(session):
    ids = tokens(STORY)
    session.generate(STORY, GREEDY.replace(stop_token_ids=[ids[2]]))
    assert session.token_ids == ids + ids[:3]


# ---------------------------------------------------------------------------------------------- fork, rewind, close


def test_a_fork_goes_its_own_way(llm, session):
    session.generate("one two", GREEDY)
    with session.fork() as fork:
        assert (fork.name, fork.token_ids) == ("session-1", session.token_ids)
        before = llm.statistics()["tokens_computed_total"]
        output = fork.generate(" three", GREEDY)
        assert llm.statistics()["tokens_computed_total"] - before == len(output.prompt_token_ids) + 4
        assert session.num_tokens < fork.num_tokens
        assert set(kept_in(llm)) == {"kept:s", "kept:session-1"}
    assert set(kept_in(llm)) == {"kept:s"}


def test_a_fork_of_nothing(llm, session):
    with session.fork() as fork:
        fork.generate("one", GREEDY)
        assert session.num_tokens == 0


def test_rewinding(llm, session):
    session.generate(STORY, GREEDY)
    ids = session.token_ids
    session.rewind(3)
    assert session.token_ids == ids[:3]
    assert kept_in(llm) == {"kept:s": 3}
    session.generate(" x", GREEDY)
    assert session.token_ids[:3] == ids[:3]
    session.rewind(np.int64(0))
    assert kept_in(llm) == {}
    assert session.generate("one", GREEDY).num_cached_tokens == 0


@pytest.mark.parametrize("num_tokens", [-1, 100, 1.5, None, True])
def test_rewinding_to_where_it_never_was(session, num_tokens):
    session.generate("one", GREEDY)
    size = session.num_tokens
    with pytest.raises(RequestError, match=f"between 0 and {size}"):
        session.rewind(num_tokens)
    assert session.num_tokens == size


def test_a_closed_session(llm):
    session = llm.open_session("s")
    session.generate("one", GREEDY)
    session.close()
    session.close()
    assert kept_in(llm) == {}
    for use in (lambda: session.generate("a"), session.fork, lambda: session.rewind(0)):
        with pytest.raises(RequestError, match="session 's' is closed"):
            use()
    llm.open_session("s").close()


def test_a_session_may_outlive_its_engine():
    with fake_llm(core=KEEPING_CORE) as llm:
        session = llm.open_session()
        session.generate("one", GREEDY)
    session.close()


def test_names(llm, session):
    with pytest.raises(RequestError, match="a session of this name is open"):
        llm.open_session("s")
    with pytest.raises(RequestError, match="a session of this name is open"):
        session.fork("s")
    with pytest.raises(RequestError, match="the name of a session has"):
        llm.open_session("with space")


@pytest.mark.parametrize(
    "several",
    [SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4), BeamSearchParams(beam_width=3, max_tokens=4)],
    ids=["n", "beams"],
)
def test_a_session_goes_on_with_the_first_of_several(llm, session, several):
    session.generate("one two", GREEDY)
    num_kept = session.num_tokens
    before = session.token_ids
    output = session.generate(" three", several)
    assert len(output.outputs) == 3
    assert session.token_ids == before + output.prompt_token_ids + output.outputs[0].token_ids
    # what is kept is still the beginning
    assert kept_in(llm) == {"kept:s": num_kept}
    before = session.token_ids
    last = session.generate(" four", GREEDY)
    assert session.token_ids == before + last.prompt_token_ids + last.outputs[0].token_ids
    assert kept_in(llm) == {"kept:s": session.num_tokens}
    session.rewind(num_kept - 1)
    assert session.num_tokens == num_kept - 1


def test_several_as_the_first_turn(llm, session):
    output = session.generate("one two", BeamSearchParams(beam_width=2, max_tokens=4))
    assert kept_in(llm) == {}
    assert session.token_ids == output.prompt_token_ids + output.outputs[0].token_ids
    session.generate(" three", GREEDY)
    assert kept_in(llm) == {"kept:s": session.num_tokens}


# ---------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs=1: a session computes only what is new"),
        ({"n": 1}, r"dict: a turn of a session takes SamplingParams or BeamSearchParams\.$"),
    ],
)
def test_what_a_turn_cannot_have_is_refused(llm, session, params, text):
    with pytest.raises(RequestError, match=text):
        session.generate("one", params)
    assert session.num_tokens == 0
    session.generate("one", GREEDY)


def test_the_whole_session_must_fit_the_model(llm, session):
    session.generate([1] * 200, GREEDY)
    with pytest.raises(ContextLengthError, match=r"session and prompt have 264 tokens together.* Rewind the session"):
        session.generate([1] * 60, GREEDY)
    output = session.generate([1] * 50, GREEDY.replace(max_tokens=100)).outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (2, "length")
    assert session.num_tokens == 256


def test_a_failed_turn_changes_nothing(llm, session):
    session.generate("one two", GREEDY)
    ids = session.token_ids
    [entry] = llm.control("list_kept")
    llm.control("release_kept", {"handle": entry["handle"]})
    with pytest.raises(RequestError, match="nothing is kept there"):
        session.generate(" three", GREEDY)
    assert session.token_ids == ids
    # what the core has lost is sent again
    session.generate(" three", GREEDY)
    assert session.token_ids[: len(ids)] == ids
    assert kept_in(llm) == {"kept:s": session.num_tokens}


def test_an_interrupted_turn_changes_nothing(llm, session):
    session.generate("one two", GREEDY)
    ids = session.token_ids
    llm.control("interrupt_next_step")
    llm.control("hold", {"at": 2})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.generate(" three", GREEDY)
    finally:
        signal.signal(signal.SIGINT, before)
        llm.control("hold")
    assert session.token_ids == ids
    session.generate(" three", GREEDY)
    assert session.token_ids[: len(ids)] == ids


# ---------------------------------------------------------------------------------------------- on an event loop


def run(scenario, own_process: bool = False) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), fake_async_llm(core=KEEPING_CORE, own_process=own_process) as engine:
            await scenario(engine)

    asyncio.run(main())


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "socket"])
def test_a_session_on_an_event_loop(llm, own_process: bool):
    with llm.open_session() as expected:
        for text in ("one two three", " four"):
            expected.generate(text, GREEDY)

    async def scenario(engine) -> None:
        async with await engine.open_session() as session:
            output = await session.generate("one two three", GREEDY)
            assert output.outputs[0].token_ids == expected.token_ids[len(output.prompt_token_ids) :][:4]
            text = "".join([delta.text async for delta in session.stream(" four", GREEDY)])
            assert session.token_ids == expected.token_ids
            assert text == text_of(expected.token_ids[-4:])
            fork = await session.fork()
            await fork.rewind(2)
            assert fork.token_ids == expected.token_ids[:2]
            await fork.close()
        assert await engine.control("list_kept") == []

    run(scenario, own_process)


def test_a_stream_that_is_left_changes_nothing():
    async def scenario(engine) -> None:
        session = await engine.open_session()
        await session.generate("one two three", GREEDY)
        ids = session.token_ids
        await engine.control("hold", {"at": 2})
        stream = session.stream(" four", GREEDY)
        await anext(stream)
        with pytest.raises(RequestError, match="in the middle of a turn"):
            await session.generate(" five", GREEDY)
        with pytest.raises(RequestError, match="in the middle of a turn"):
            await session.fork()
        await stream.aclose()
        await engine.control("hold")
        assert session.token_ids == ids
        await session.generate(" four", GREEDY)
        assert session.token_ids[: len(ids)] == ids
        assert engine.num_open_requests == 0

    run(scenario)


def test_a_reader_may_leave_with_the_last_delta():
    async def scenario(engine) -> None:
        session = await engine.open_session()
        async for delta in session.stream("one two", GREEDY):
            if delta.finish_reason:
                break
        assert session.token_ids == (tokens("one two") * 4)[: session.num_tokens]
        assert session.num_tokens == len(tokens("one two")) + 4

    run(scenario)


def test_a_turn_that_fails_on_an_event_loop_raises():
    async def scenario(engine) -> None:
        session = await engine.open_session()
        await engine.control("hold", {"at": 1})
        turn = asyncio.create_task(session.generate("one two", GREEDY))
        while not (await engine.statistics())["sequences_running"]:
            pass
        await engine.control("fail_requests", {"error": "out of luck"})
        await engine.control("hold")
        with pytest.raises((RequestFailedError, RequestError), match="out of luck"):
            await turn
        assert session.num_tokens == 0
        await session.generate("one two", GREEDY)

    run(scenario)


def test_the_death_of_the_engine_is_said(llm, session):
    session.generate("one", GREEDY)
    llm.control("fail_next_step")
    with pytest.raises(EngineDeadError):
        session.generate(" two", GREEDY)


def test_closing_ends_the_turn_in_flight():
    async def scenario(engine) -> None:
        async def leave() -> None:
            async with await engine.open_session("left") as session:
                await session.generate("one", GREEDY)
                await engine.control("hold", {"at": 2})
                async for _ in session.stream(" two", GREEDY):
                    raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await leave()
        async with await engine.open_session("left") as session:
            async for _ in session.stream(" two", GREEDY):
                break
        session = await engine.open_session("left")
        turn = asyncio.create_task(session.generate(" two", GREEDY))
        while not engine.num_open_requests:
            await asyncio.sleep(0)
        await session.close()
        assert (await turn).outputs[0].finish_reason == "abort"
        await engine.control("hold")
        assert (await engine.control("list_kept"), engine.num_open_requests) == ([], 0)
        with pytest.raises(RequestError, match="is closed"):
            await session.generate("one", GREEDY)

    run(scenario)


def test_an_error_of_closing_does_not_replace_another():
    async def scenario(engine) -> None:
        async def fails() -> None:
            raise RequestError("not now")

        async def leave() -> None:
            async with await engine.open_session("s") as session:
                session._close = fails
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine") as caught:
            await leave()
        assert caught.value.__notes__ == ["Closing session 's' failed as well: not now"]

    run(scenario)


def test_forks_at_the_same_time():
    async def scenario(engine) -> None:
        session = await engine.open_session()
        await session.generate("one two", GREEDY)
        *forks, _ = await asyncio.gather(*(session.fork() for _ in range(4)), session.rewind(2))
        assert [fork.num_tokens for fork in forks] == [len(tokens("one two")) + 4] * 4
        assert len({fork.name for fork in forks}) == 4
        await asyncio.gather(*(fork.close() for fork in forks), session.close(), session.close())
        assert await engine.control("list_kept") == []

    run(scenario)


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "socket"])
def test_a_cancelled_fork_leaves_nothing(own_process: bool):
    async def scenario(engine) -> None:
        session = await engine.open_session("s")
        await session.generate("one", GREEDY)
        for rounds in range(6):
            fork = asyncio.create_task(session.fork("child"))
            for _ in range(rounds):
                await asyncio.sleep(0)
            fork.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await fork).close()
            assert len(await engine.control("list_kept")) == 1
        child = await session.fork("child")
        await child.generate(" two", GREEDY)

    run(scenario, own_process)


def test_handles_are_not_used_twice(llm):
    seen = set()
    for _ in range(3):
        with llm.open_session("s") as session:
            session.generate("one", GREEDY)
            seen |= {entry["handle"] for entry in llm.control("list_kept")}
    assert len(seen) == 3
