"""Pinned prefixes over a core without a model that keeps what it is told to keep."""

import asyncio
import json
import logging
import os
import signal

import pytest

from quire import AsyncLLM, EngineDeadError, OptionError, RequestError, SamplingParams
from quire.errors import ContextLengthError
from quire.interfaces.pinned_prefixes import PinnedPrefix
from quire.testing.fake_kept import KEEPING_CORE
from quire.testing.fake_llm import fake_async_llm, fake_llm, fake_renderer

PREFIX = "You are a helpful assistant.\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
LINKS = pytest.mark.parametrize("own_process", [False, True], ids=["in process", "socket"])


def tokens(text: str) -> list[int]:
    return fake_renderer().render_prompt(text).token_ids


@pytest.fixture
def llm():
    with fake_llm(core=KEEPING_CORE) as one:
        yield one


@LINKS
def test_later_prompts_use_a_pinned_prefix(own_process: bool):
    with fake_llm(core=KEEPING_CORE, own_process=own_process) as llm:
        pinned = llm.pin_prefix(PREFIX, "helpful")
        size = len(tokens(PREFIX))
        assert pinned == PinnedPrefix("helpful", num_tokens=size, num_blocks=1, num_hits=0, num_hit_tokens=0)
        outputs = llm.generate([PREFIX + "Tell me.", "Something else", PREFIX + "No."], GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [size, 0, size]
        [usage] = llm.pinned_prefixes()
        assert (usage.num_hits, usage.num_hit_tokens) == (2, 2 * size)
        llm.unpin_prefix("helpful")
        assert llm.pinned_prefixes() == []
        [output] = llm.generate(PREFIX + "Tell me.", GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 0


def test_a_prefix_is_text_tokens_or_a_chat(llm):
    chat = [{"role": "system", "content": "Be kind."}]
    as_chat = fake_renderer().render_prompt(chat, add_generation_prompt=False).token_ids
    sizes = [llm.pin_prefix(prompt).num_tokens for prompt in (PREFIX, tokens(PREFIX), {"prompt": PREFIX}, chat)]
    assert sizes == [len(tokens(PREFIX))] * 3 + [len(as_chat)]
    assert [prefix.name for prefix in llm.pinned_prefixes()] == ["prefix-1", "prefix-2", "prefix-3", "prefix-4"]
    question = [*chat, {"role": "user", "content": "Who are you?"}]
    [output] = llm.chat(question, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == len(as_chat)


def test_only_prompts_of_the_same_salt_use_it():
    async def main() -> None:
        async with fake_async_llm(core=KEEPING_CORE) as engine:
            await engine.pin_prefix(PREFIX, "salted", cache_salt="mine")
            found = []
            for salt in ("", "mine", "other"):
                prepared = await engine.prepare(PREFIX + "Go.", GREEDY, cache_salt=salt)
                found.append([output async for output in engine.generate(prepared)][-1].num_cached_tokens)
            assert found == [0, len(tokens(PREFIX)), 0]

    asyncio.run(main())


def test_a_prompt_may_bring_its_salt(llm):
    llm.pin_prefix(PREFIX, cache_salt="mine")
    text = PREFIX + "Go."
    prompts = [text, {"prompt": text, "cache_salt": "mine"}, {"prompt_token_ids": tokens(text), "cache_salt": "mine"}]
    outputs = llm.generate([*prompts, {"prompt": text, "cache_salt": "other"}], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, *[len(tokens(PREFIX))] * 2, 0]
    with pytest.raises(RequestError, match="cache_salt=5: must be a text"):
        llm.generate({"prompt": text, "cache_salt": 5}, GREEDY)


def test_a_request_has_one_salt():
    async def main() -> None:
        async with fake_async_llm(core=KEEPING_CORE) as engine:
            prompt = {"prompt": PREFIX, "cache_salt": "mine"}
            for beside in (None, "mine"):
                assert (await engine.prepare(prompt, GREEDY, cache_salt=beside)).request.cache_salt == "mine"
            with pytest.raises(RequestError, match="cache_salt='other': the prompt has cache_salt='mine'"):
                await engine.prepare(prompt, GREEDY, cache_salt="other")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "name", "text"),
    [
        (PREFIX, "taken", "'taken': a prefix of this name is pinned already"),
        (PREFIX, "a b", "name='a b': the name of a pinned prefix"),
        (PREFIX, "x" * 65, "1 to 64 letters"),
        (PREFIX, 7, "name=7"),
        (PREFIX, "", "name=''"),
        (PREFIX, ".", "name='.'"),
        (PREFIX, "..", "name='..'"),
        ("", "new", "^text: .*it has no tokens"),
        ([], "new", "^token_ids: .*it has no tokens"),
        ([-1], "new", r"^token_ids\[0\]=-1"),
        ([[{"role": "user"}]], "new", "prompt"),
        (
            {"token_ids": [1]},
            "new",
            "'token_ids' is not supported, only prompt, prompt_token_ids, prompt_embeds, cache_salt",
        ),
        (5, "new", '{"prompt_token_ids": \\[ids\\]}'),
        ({"prompt": PREFIX, "cache_salt": "x"}, "new", "cache_salt='x': it belongs to the prefix"),
    ],
)
def test_what_cannot_be_pinned(llm, prompt, name, text):
    llm.pin_prefix("Something", "taken")
    with pytest.raises(RequestError, match=text):
        llm.pin_prefix(prompt, name)
    assert [prefix.name for prefix in llm.pinned_prefixes()] == ["taken"]


def test_a_prefix_that_is_too_long(llm):
    with pytest.raises(ContextLengthError, match="256"):
        llm.pin_prefix([1] * 256)
    assert llm.pin_prefix([1] * 255).num_blocks == 16


def test_a_prefix_that_does_not_fit_leaves_nothing_behind(llm):
    for number in range(2):
        llm.pin_prefix([number] * 255)
    with pytest.raises(RequestError, match="16 blocks cannot be pinned"):
        llm.pin_prefix([7] * 255, "too-much")
    assert llm.statistics()["num_kept_sequences"] == 2
    llm.unpin_prefix("prefix-1")
    assert llm.pin_prefix([7] * 255).name == "prefix-1"


def test_a_prefix_that_lost_its_blocks_is_computed_again(llm):
    llm.control("evict_next", {"count": 2})
    assert llm.pin_prefix(PREFIX).num_blocks == 1
    assert llm.statistics()["tokens_computed_total"] == 3 * len(tokens(PREFIX))
    llm.control("evict_next", {"count": 3})
    with pytest.raises(RequestError, match="computed 3 times, and each time running requests"):
        llm.pin_prefix(PREFIX)
    assert llm.statistics()["num_kept_sequences"] == 1


def test_unpinning_what_is_not_pinned(llm):
    llm.pin_prefix(PREFIX, "helpful")
    with pytest.raises(RequestError, match='Did you mean "helpful"') as caught:
        llm.unpin_prefix("helpfull")
    assert caught.value.code == "prefix_not_found"


def test_sessions_and_prefixes_do_not_meet(llm):
    with llm.open_session("same") as session:
        session.generate("Hello", GREEDY)
        llm.pin_prefix(PREFIX, "same")
        assert [prefix.name for prefix in llm.pinned_prefixes()] == ["same"]
    assert [prefix.name for prefix in llm.pinned_prefixes()] == ["same"]


def test_without_the_prefix_cache_nothing_can_be_pinned():
    with (
        fake_llm(core=KEEPING_CORE, enable_prefix_caching=False) as llm,
        pytest.raises(RequestError, match="enable_prefix_caching=False"),
    ):
        llm.pin_prefix(PREFIX)


def test_a_dead_engine_is_said_to_be_dead(llm):
    llm.control("fail_next_step")
    with pytest.raises(EngineDeadError):
        llm.pin_prefix(PREFIX)


def test_two_at_once_do_not_get_one_name():
    async def main() -> None:
        async with fake_async_llm(core=KEEPING_CORE) as engine:
            await engine.control("hold", {"at": 0})
            first = asyncio.create_task(engine.pin_prefix(PREFIX, "one"))
            while not engine.num_open_requests:
                await asyncio.sleep(0)
            with pytest.raises(RequestError, match="pinned already"):
                await engine.pin_prefix(PREFIX, "one")
            second = asyncio.create_task(engine.pin_prefix(PREFIX))
            await engine.control("hold")
            assert {(await first).name, (await second).name} == {"one", "prefix-1"}

    asyncio.run(main())


@pytest.mark.parametrize("rounds", range(0, 40, 3))
@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "socket"])
def test_a_cancelled_pin_leaves_nothing(own_process: bool, rounds: int):
    async def main() -> None:
        async with fake_async_llm(core=KEEPING_CORE, own_process=own_process) as engine:
            pin = asyncio.create_task(engine.pin_prefix(PREFIX, "one"))
            for _ in range(rounds):
                await asyncio.sleep(0)
            pin.cancel()
            try:
                await pin
                await engine.unpin_prefix("one")
            except asyncio.CancelledError:
                pass
            assert await engine.control("list_kept") == []
            assert (await engine.pin_prefix(PREFIX, "one")).name == "one"

    asyncio.run(main())


@pytest.mark.parametrize("operation", ["pin_kept", "list_kept"])
def test_an_interrupted_pin_leaves_nothing(llm, monkeypatch, operation: str):
    engine = llm._engine
    control = engine.control

    async def interrupted(name, args=None):
        result = await control(name, args)
        if name == operation:
            monkeypatch.undo()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)  # the caller's thread cancels it
        return result

    monkeypatch.setattr(engine, "control", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.pin_prefix(PREFIX, "one")
    finally:
        signal.signal(signal.SIGINT, before)
    assert llm.control("list_kept") == []
    llm.pin_prefix(PREFIX, "one")


# ---------------------------------------------------------------------------------------------- the start-up file


@pytest.fixture
def file(tmp_path):
    def write(*entries) -> str:
        path = tmp_path / "prefixes.json"
        path.write_text(json.dumps(entries))
        return str(path)

    return write


GOOD = {"name": "helpful", "text": PREFIX}
TOO_LONG = {"name": "long", "token_ids": [1] * 400}


def test_prefixes_of_a_file_are_pinned_at_start(file, caplog, monkeypatch):
    # another test may have made this process a program, whose log does not go through the root
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with caplog.at_level("INFO", "quire"), fake_llm(core=KEEPING_CORE, pinned_prefixes=file(GOOD)) as llm:
        assert [prefix.name for prefix in llm.pinned_prefixes()] == ["helpful"]
    assert f"pinned prefix helpful: {len(tokens(PREFIX))} tokens, 1 blocks" in caplog.text


def test_a_start_that_cannot_pin_fails(file):
    with pytest.raises(OptionError, match=r"prefixes\.json: prefix 'long' cannot be pinned: This model's maximum"):
        fake_llm(core=KEEPING_CORE, pinned_prefixes=file(GOOD, TOO_LONG))


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "socket"])
def test_the_same_for_an_event_loop(file, own_process: bool):
    def engine(path: str) -> AsyncLLM:
        return fake_async_llm(core=KEEPING_CORE, own_process=own_process, pinned_prefixes=path)

    async def main() -> None:
        async with engine(file(GOOD)) as good:
            assert [prefix.name for prefix in await good.pinned_prefixes()] == ["helpful"]
            await good.unpin_prefix("helpful")
            assert (await good.memory()).slots["pinned"] == 0
        bad = engine(file(GOOD, TOO_LONG))
        with pytest.raises(OptionError, match="prefix 'long' cannot be pinned"):
            await bad.start()
        assert not bad.is_running
        assert bad.num_open_requests == 0

    asyncio.run(main())
