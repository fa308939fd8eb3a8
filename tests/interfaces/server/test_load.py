"""The load of many requests: its figures, and a short one that finds what is wrong."""

import asyncio
import json
import mmap
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support import null_core
from tests.support.load import many as load
from tests.support.load import mix
from tests.support.load.leaks import Growth, Inventory, Processes
from tests.support.load.plain_client import Answer, Choice
from tests.support.shared_memory import shared_files

from quire.messages import EngineRequest, sequence_id_of
from quire.sampling_params import SamplingParams
from quire.testing.fake_llm import fake_config


def growth(slope, noise=(0,)):
    grown = Growth()
    for number in range(100):
        grown.add(number * 1000, 10**8 + int(number * 1000 * slope) + noise[number % len(noise)])
    return grown.slope()


def test_a_slope_is_found_and_bounded():
    slope, upper = growth(25.0, (-3000, 3000))
    assert slope == pytest.approx(25, abs=0.5)
    assert slope < upper < slope + 0.5
    assert growth(0.0, (-9000, 9000))[1] < 1
    assert Growth([1, 2], [1, 2]).slope() is None


def test_the_first_fifth_does_not_count():
    grown = Growth()
    for number in range(100):
        grown.add(number, 10**6 * min(number, 15))
    assert grown.slope() == (0, 0)


def test_requests_follow_from_their_number_alone():
    first = [mix.request(number, 0) for number in range(2000)]
    assert first == [mix.request(number, 0) for number in range(2000)]
    shares = {kind: count / 2000 for kind, count in Counter(one.kind for one in first).items()}
    usual = {
        "left": 0.1,
        "several": 0.1,
        "stopped": 0.05,
        "refused": 0.05,
        "form": 0.05,
        "logprobs": 0.05,
        "plain": 0.6,
    }
    assert shares == pytest.approx(usual, abs=0.025)
    assert sum(one.fields["stream"] for one in first) / 2000 == pytest.approx(0.6, abs=0.05)
    streamed, whole = (mix.Request("plain", {"prompt": "a", "stream": is_stream}) for is_stream in (True, False))
    assert streamed.key == whole.key


def test_a_warm_up_has_every_kind_streamed_and_whole():
    first = list(mix.warm_up(1000))
    assert set(Counter((one.kind, one.fields["stream"]) for one in first).values()) == {5}
    assert {one.kind for one in first} == set(mix.KINDS)


def answer(text, finish_reason="stop", logprobs=None):
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}
    return Answer(200, json.dumps({"choices": [choice]}).encode(), is_stream=False)


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (mix.FORMS[0], '{"colour": "red", "size": 7}', '{"colour": "red", "size": 100}'),
        (mix.FORMS[1], '{"known":true,"names":["Bo"]}', '{"known":true,"names":[]}'),
        (mix.FORMS[2], '["abc","xyz"]', '["abc","xy"]'),
    ],
)
def test_a_text_that_has_not_its_form_is_found(form, right, wrong):
    asked = mix.Request("form", {"stream": False}, form=form)

    def fault(text, finish_reason="stop", **options):
        given = {"follows_forms": True, **options}
        return mix.fault_of(asked, answer(text, finish_reason), [text], None, **given)

    assert fault(right) is None
    assert "does not follow" in fault(wrong)
    assert "does not follow" in fault(right[:-1])
    assert "does not follow" in fault(right, "length")
    assert fault(wrong, follows_forms=False) is None


def test_wrong_log_probabilities_are_found():
    asked = mix.Request("logprobs", {"stream": False, "max_tokens": 2})
    alone = Choice("ab!", "length", ["a", "b", "!"], [-0.5, -1.0, -2.0])

    def fault(tokens, logprobs):
        given = answer("ab", "length", {"tokens": tokens, "token_logprobs": logprobs})
        return mix.fault_of(asked, given, ["ab"], alone, follows_forms=True)

    assert fault(["a", "b"], [-0.5, -1.00001]) is None
    assert "1 log-probabilities" in fault(["a"], [-0.5])
    assert "tokens" in fault(["a", "c"], [-0.5, -1.0])
    assert "finite" in fault(["a", "b"], [-0.5, float("-inf")])
    assert "0.1 apart" in fault(["a", "b"], [-0.6, -1.0])


def test_a_stream_says_what_a_whole_answer_says():
    parts = [
        {"text": "a", "finish_reason": None, "logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}},
        {"text": "b", "finish_reason": "length", "logprobs": {"tokens": ["b"], "token_logprobs": [-2.0]}},
    ]
    events = [b"data: " + json.dumps({"choices": [{"index": 0, **part}]}).encode() for part in parts]
    streamed = Answer(200, b"\n\n".join([*events, b"data: [DONE]", b""]), is_stream=True)
    assert streamed.choices() == [Choice("ab", "length", ["a", "b"], [-1.0, -2.0])]
    assert streamed.is_whole


def test_what_is_left_is_named():
    before = Inventory(Counter({"threads, server": 3}), {"a", "b"}, {})
    assert before.more_than(before) == []
    assert replace(before, counts=Counter({"threads, server": 2})).more_than(before) == []
    later = Inventory(Counter({"threads, server": 4, "processes, other": 1}), {"a", "b", 'c{user="1"}'}, {"held": 2.0})
    assert later.more_than(before) == [
        "held is 2 and not 0",
        "threads, server: 4 and not 3",
        "processes, other: 1 and not 0",
        "series of metrics: 3 and not 2: ['c{user=\"1\"}']",
    ]
    later = replace(before, shared=frozenset({"psm_1", "sem.2"}))
    assert later.more_than(before) == ["files in /dev/shm: 2 and not 0: ['psm_1', 'sem.2']"]
    # another one in the place of an old one
    assert later.more_than(replace(before, shared=frozenset({"psm_1", "sem.3"}))) == []


def test_processes_are_counted():
    processes = Processes(os.getpid())
    before = processes.counts()
    assert before["processes, server"] == 1
    with open(os.devnull):
        assert processes.counts()["descriptors, server"] == before["descriptors, server"] + 1
    assert processes.memory()["server"] > 2**20


def test_the_null_core_says_what_follows_from_prompt_and_seed():
    core = null_core.build(fake_config())
    prompts = {1: [5, 6, 7], 2: [9]}
    for number, prompt in prompts.items():
        sampling = SamplingParams(n=2, max_tokens=5 * number, seed=number)
        core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
    said: dict[int, list[int]] = {}
    while core.has_work:
        outputs = core.step()
        for sequence_id, token_id in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            said.setdefault(sequence_id, []).append(token_id)
    assert said == {
        sequence_id_of(number, index): null_core.answer(prompt, number, index, 5 * number)
        for number, prompt in prompts.items()
        for index in (0, 1)
    }


def test_the_null_core_gives_log_probabilities_to_those_who_ask():
    core = null_core.build(fake_config())
    for number, logprobs in enumerate((2, None)):
        sampling = SamplingParams(max_tokens=3, logprobs=logprobs)
        core.add(EngineRequest(request_id=number, prompt_token_ids=[5], sampling=sampling))
    said = []
    while core.has_work:
        said += core.step().logprobs
    assert [(entry.sequence_id, len(entry.positions)) for entry in said] == [(sequence_id_of(0, 0), 1)] * 3
    tokens = [entry.positions[0].token_ids[0] for entry in said]
    assert tokens == null_core.answer([5], 0, 0, 3)
    assert [entry.positions[0] for entry in said] == [null_core.logprobs_of(token, 2) for token in tokens]
    assert not core._num_best


def test_a_short_load_and_another_piece(tmp_path):
    path = tmp_path / "state.json"
    for total in (60, 120):
        state = load.many("null", total, 60, 0, path)
        assert (state.num_requests, state.wrong, state.left) == (total, [], [])
    assert sum(state.kinds.values()) == 120
    assert set(state.statuses) == {"200", "400"}
    assert 0 < state.log_bytes < 300 * 2 * 120


@pytest.mark.nightly
def test_a_short_load_on_a_model():
    state = load.many("embedded", 1000, 60, 0, None)
    assert (state.num_requests, state.wrong, state.left) == (1000, [], [])
    assert state.kinds["form"] > 20 < state.kinds["logprobs"]


@pytest.fixture
def forgotten():
    """A file in /dev/shm that nobody has open."""
    path = Path(f"/dev/shm/quire-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def test_files_in_shared_memory_are_somebodys_or_nobodys(forgotten):
    name = forgotten.name
    with open(forgotten, "wb") as file:
        file.write(b"x")
        file.flush()
        # whoever has it open knows why
        assert name not in shared_files()
        assert name in shared_files([os.getpid()])
        assert name in Processes(os.getpid()).shared_files()
    assert name in shared_files()
    with open(forgotten, "r+b") as file, mmap.mmap(file.fileno(), 1):
        file.close()
        assert name not in shared_files()
    forgotten.unlink()
    assert name not in shared_files()


def test_what_is_wrong_and_what_is_kept_is_found(monkeypatch, forgotten):
    monkeypatch.setattr(load, "_IDLE_SECONDS", 0.0)
    ask_all, choices = load.ManyRequests._ask_all, Answer.choices
    kept = []

    async def ask_all_and_stay(many, requests, *count):
        if count:
            kept.append(await asyncio.open_connection(*many._place))
            # the server waits for its body
            kind = b"content-type: application/json\r\ncontent-length: 9\r\n\r\n"
            kept[-1][1].write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + kind)
            forgotten.touch()
            monkeypatch.setattr(Answer, "choices", lambda one: [Choice("x")] if one.is_stream else choices(one))
        await ask_all(many, requests, *count)

    monkeypatch.setattr(load.ManyRequests, "_ask_all", ask_all_and_stay)
    state = load.many("null", 40, 60, 0, None)
    assert len(state.wrong) > 5
    for what in ("descriptors, server", "tasks of the event loop, server", "files in /dev/shm"):
        assert any(found.startswith(what) for found in state.left), state.left
    assert {*state.wrong, *state.left} <= set(state.failures())


def test_a_state_says_what_failed():
    slopes = [{"server": (12.0, 14.0), "engine": (1.0, 2.0)}]
    state = load.ManyState(10, statuses={"200": 5, "500": 1}, slopes=slopes, log_bytes=4000, left=["a thread"])
    assert state.failures() == [
        "a thread",
        "the log has 400 bytes a request",
        "1 answers 500",
        "server grows by 12.0 (at most 14.0) bytes a request",
    ]
