"""Decoding methods as their authors meet them: the example of docs/decoding.md, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from quire.engine_core import decoding
from quire.engine_core.decoding.method import Verbs
from quire.engine_core.decoding.parallel_sampling import ParallelSampling
from quire.engine_core.request import Request, Sequence
from quire.errors import RequestError
from quire.messages import MOST_SEQUENCES, Candidates, DecodingSpec, EngineRequest, TokenLogprobs, sequence_id_of
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checking_model import expected_tokens


class FirstThenBest:
    """Takes the second-best token first, and the best ones after it."""

    num_sequences = num_outputs = 1
    num_candidates = 2

    def __init__(self, message: EngineRequest, **args: Any) -> None:
        self.max_tokens = message.sampling.max_tokens
        self.num_tokens = 0

    def after_token(self, sequence: Sequence, verbs: Verbs) -> bool:
        raise AssertionError("the worker samples nothing here")

    def after_candidates(self, request: Request, answers: Mapping[int, Candidates], verbs: Verbs) -> None:
        (candidates,) = answers.values()
        rank = 1 if self.num_tokens == 0 else 0
        token, logprob = candidates.token_ids[rank], candidates.logprobs[rank]
        verbs.emit(request, 0, [token], [TokenLogprobs([token], [logprob], [rank + 1])])
        self.num_tokens += 1
        if self.num_tokens == self.max_tokens:
            verbs.finish(request, 0, "length")
        else:
            verbs.append(request.sequences[0], token)


def test_a_method_that_cannot_be_loaded_is_the_request_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("lost", "json:Lost", "quire.decoding_methods")
    monkeypatch.setattr(decoding, "entry_points", lambda group: [entry])
    spec = DecodingSpec(method="lost", args={})
    request = EngineRequest(request_id=1, prompt_token_ids=[1], sampling=SamplingParams(), decoding=spec)
    with pytest.raises(RequestError, match=r"entry point .json:Lost. cannot be loaded .*Lost.* Mend"):
        decoding.make_method(request)


def test_what_a_method_s_package_raises_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        name = value = "broken"

        def load(self) -> None:
            raise ImportError("the first line\n  and the second")

    monkeypatch.setattr(decoding, "entry_points", lambda group: [Broken()])
    spec = DecodingSpec(method="broken", args={})
    request = EngineRequest(request_id=1, prompt_token_ids=[1], sampling=SamplingParams(), decoding=spec)
    with pytest.raises(RequestError, match=r"cannot be loaded \(the first line and the second\)"):
        decoding.make_method(request)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("first_then_best", f"{__name__}:FirstThenBest", "quire.decoding_methods")
    monkeypatch.setattr(EntryPoint, "load", lambda self: FirstThenBest)
    monkeypatch.setattr(decoding, "entry_points", lambda group: [entry])


def add(core: CoreUnderTest, number: int, method: str, **args: Any) -> None:
    spec = DecodingSpec(method=method, args=args)
    core.add(number, [1, 2, 3, 4, 5], max_tokens=6, request={"decoding": spec})


@pytest.mark.usefixtures("installed")
def test_a_method_from_elsewhere_runs_among_others() -> None:
    core = CoreUnderTest()
    add(core, 1, "first_then_best")
    core.add(2, [7, 8, 9], max_tokens=9)
    core.beam(3, [1, 2, 3, 4, 5], 2, max_tokens=6)
    core.run()
    assert core.ends[sequence_id_of(1, 0)].finish_reason == "length"
    assert len(core.tokens[sequence_id_of(1, 0)]) == 6
    # both see the same candidates; this one began with the second-best
    alone = CoreUnderTest()
    alone.beam(3, [1, 2, 3, 4, 5], 1, max_tokens=6)
    alone.run()
    assert core.tokens[sequence_id_of(1, 0)][0] != alone.tokens[sequence_id_of(3, 0)][0]
    core.assert_empty()


@pytest.mark.usefixtures("installed")
def test_a_method_survives_preemption() -> None:
    wanted = CoreUnderTest()
    add(wanted, 1, "first_then_best")
    wanted.run()
    for mode in ("recompute", "swap"):
        core = CoreUnderTest(num_host_blocks=16, preemption_mode=mode)
        add(core, 1, "first_then_best")
        core.step()
        core.scheduler._preempt(core.scheduler.lifecycle.requests[1], "a test")
        core.run()
        assert core.tokens == wanted.tokens, mode


class SeesTwo:
    """Might fork, and does not: it has seen enough with the second token."""

    num_sequences = 2
    num_outputs = 1
    num_candidates = 0

    def __init__(self) -> None:
        self.seen: list[int] = []

    def after_token(self, sequence: Sequence, verbs: Verbs) -> bool:
        self.seen.append(sequence.num_known_tokens)
        return len(self.seen) < 2

    def after_candidates(self, request: Request, answers: Mapping[int, Candidates], verbs: Verbs) -> None:
        raise AssertionError("the worker samples here")


@pytest.mark.parametrize("after", [2, 4], ids=["while it looks", "when it has seen enough"])
def test_a_method_that_has_seen_enough_is_asked_no_more_in_another_row(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = SeesTwo()
    monkeypatch.setitem(decoding._BUILT_IN, "sees_two", lambda message: method)
    core = CoreUnderTest(max_num_seqs=2, policy="priority")
    spec = DecodingSpec(method="sees_two")
    core.add(1, [5, 6, 7], max_tokens=12, request={"decoding": spec, "priority": 5})
    for _ in range(after - 1):
        core.step()
    core.add(2, [8, 9], max_tokens=3, request={"priority": 0})
    core.step()
    assert not core.scheduler.lifecycle.requests[1].holds_rows
    core.run()
    assert method.seen == [4, 5]
    assert core.tokens[sequence_id_of(1, 0)] == expected_tokens([5, 6, 7], 12, vocab_size=50)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_method_that_raises_ends_its_request_also_at_the_last_token(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(self: ParallelSampling, sequence: Sequence, verbs: Verbs) -> bool:
        raise KeyError("a method of somebody")

    core = CoreUnderTest()
    core.add(1, [1, 2], max_tokens=1)
    monkeypatch.setattr(ParallelSampling, "after_token", raises)
    core.add(2, [5, 6, 7], n=3, max_tokens=max_tokens)
    core.run()
    ends = [core.ends[sequence_id_of(2, index)] for index in range(3)]
    assert [(end.finish_reason, end.error) for end in ends] == [
        ("error", "its decoding method failed: KeyError: 'a method of somebody'")
    ] * 3
    assert core.ends[sequence_id_of(1, 0)].finish_reason == "length"
    core.assert_empty()


@pytest.mark.parametrize(
    ("method", "args", "complaint"),
    [
        ("bean_search", {"width": 2}, 'Did you mean "beam_search"'),
        ("beam_search", {}, "width"),
        ("beam_search", {"width": 2, "depth": 3}, "depth"),
        ("beam_search", {"width": "two"}, "whole number"),
        ("beam_search", {"width": 2, "early_stopping": "sometimes"}, "early_stopping"),
        ("beam_search", {"width": 2, "early_stopping": 1}, "early_stopping"),
        ("beam_search", {"width": 2, "length_penalty": "long"}, "length_penalty"),
        ("beam_search", {"width": 99}, "max_num_seqs"),
        ("beam_search", {"width": MOST_SEQUENCES}, "max_num_seqs"),
        ("beam_search", {"width": MOST_SEQUENCES + 1}, "between 1 and 1024"),
        ("beam_search", {"width": 10**12, "num_groups": 10**12}, "between 1 and 1024"),
        ("diverse_beam_search", {"width": 4, "num_groups": 3, "diversity_penalty": 1.0}, "must divide"),
        ("diverse_beam_search", {"width": 4, "num_groups": 2, "diversity_penalty": None}, "diversity_penalty"),
    ],
)
def test_what_makes_no_sense_ends_one_request(method: str, args: dict[str, Any], complaint: str) -> None:
    core = CoreUnderTest()
    core.add(1, [1, 2], max_tokens=3)
    add(core, 2, method, **args)
    core.run()
    assert complaint in (core.ends[sequence_id_of(2, 0)].error or "")
    assert core.ends[sequence_id_of(1, 0)].finish_reason == "length"


@pytest.mark.parametrize("asked", [{"logit_bias": {3: 5.0}}, {"min_tokens": 2}, {"min_p": 0.5}])
def test_what_beams_cannot_heed_is_refused(asked: dict[str, Any]) -> None:
    """Candidates are the model's own: it would be left out without a word."""
    core = CoreUnderTest()
    spec = DecodingSpec(method="beam_search", args={"width": 2})
    core.add(1, [1, 2], max_tokens=3, n=2, request={"decoding": spec}, **asked)
    core.run()
    (name,) = asked
    assert (core.ends[sequence_id_of(1, 0)].error or "").startswith(f"{name}: not together with beams")


@pytest.mark.parametrize("name", ["num_sequences", "num_outputs"])
def test_a_method_has_no_more_sequences_than_there_are_numbers_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones would bear those of the request behind it."""
    method = SeesTwo()
    monkeypatch.setitem(decoding._BUILT_IN, "sees_two", lambda message: method)
    monkeypatch.setattr(method, name, MOST_SEQUENCES + 1, raising=False)
    core = CoreUnderTest(max_num_seqs=2 * MOST_SEQUENCES, num_blocks=2 * MOST_SEQUENCES)
    add(core, 1, "sees_two")
    core.run()
    assert "with 1025 sequences; a request has at most 1024" in (core.ends[sequence_id_of(1, 0)].error or "")
    assert len(core.ends) == 1
