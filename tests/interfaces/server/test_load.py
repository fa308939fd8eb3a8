"""The load of many requests: its figures, and a short one that finds what is wrong."""

import json

import pytest

from quire.messages import EngineRequest, sequence_id_of
from quire.sampling_params import SamplingParams
from quire.testing import null_core
from quire.testing.fake_llm import fake_config
from quire.testing.load import many as load
from quire.testing.load.leaks import Growth
from quire.testing.load.plain_client import Answer


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
    first = [load.request(number, 0) for number in range(1000)]
    assert first == [load.request(number, 0) for number in range(1000)]
    kinds = {
        kind: sum(one.kind == kind for one in first) for kind in ("plain", "left", "several", "stopped", "refused")
    }
    assert all(kinds.values())
    streamed, whole = (load.Request("plain", {"prompt": "a", "stream": is_stream}) for is_stream in (True, False))
    assert streamed.key == whole.key


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


def test_a_short_load_and_another_piece(tmp_path):
    path = tmp_path / "state.json"
    for total in (150, 300):
        state = load.many("null", total, 60, 0, path)
        assert (state.num_requests, state.wrong) == (total, [])
    assert sum(state.kinds.values()) == 300
    assert set(state.statuses) == {"200", "400"}


def test_what_is_wrong_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_NUM_PROMPTS", 1)
    right = Answer.texts
    monkeypatch.setattr(Answer, "texts", lambda answer: right(answer) if not answer.is_stream else ["x"])
    state = load.many("null", 100, 60, 0, None)
    assert state.wrong
    assert state.failures()


def test_a_state_says_what_failed():
    state = load.ManyState(statuses={"200": 5, "500": 1}, slopes=[{"server": (12.0, 14.0), "engine": (1.0, 2.0)}])
    assert state.failures() == ["1 answers 500", "server grows by 12.0 (at most 14.0) bytes a request"]
    assert json.dumps(state.failures())
