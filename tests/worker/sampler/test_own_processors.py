"""Logits processors that do not come with Quire: by function and by name; what one breaks is its own row."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.logits_processors import installed
from quire.outputs import RequestOutput
from quire.worker.row_table import RowTable
from quire.worker.sampler.beside import BesideSteps
from quire.worker.sampler.processors import built_in_processors, call_budget
from quire.worker.sampler.processors.call_budget import CallBudget, EqualBudget, TooSlowError
from quire.worker.sampler.processors.own_processors import OwnProcessor, OwnProcessors


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=8) as made:
        yield made


def outputs(llm: LLM, each: list[Any], n: int = 1) -> list[RequestOutput]:
    params = [SamplingParams(temperature=0.0, max_tokens=6, logits_processors=one, n=n) for one in each]
    return llm.generate(["Once upon a time"] * len(each), params, use_tqdm=False)


def texts(llm: LLM, each: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs(llm, each)]


def only_seven(token_ids: list[int], logits: Tensor) -> None:
    logits[:7] = float("-inf")
    logits[8:] = float("-inf")


def counting_up(token_ids: list[int], logits: Tensor) -> Tensor:
    answer = logits.clone().fill_(-1.0)
    answer[100 + len(token_ids)] = 1.0
    return answer


def with_prompt(prompt: list[int], output: list[int], logits: Tensor) -> None:
    logits[prompt[len(output)]] = 1e4


def test_functions_choose_and_the_others_keep_their_tokens(llm: LLM) -> None:
    plain = texts(llm, [None])[0]
    prompt = llm.renderer.encode("Once upon a time")
    found = texts(llm, [[only_seven], None, [counting_up], [with_prompt], None])
    assert found[0] == [7] * 6
    assert found[2] == list(range(100, 106))
    assert found[3][:3] == prompt[:3]
    assert found[1] == found[4] == plain


def broken(token_ids: list[int], logits: Tensor) -> Any:
    if len(token_ids) == 2:
        raise ZeroDivisionError("one of those days")
    return None


def of_another_shape(token_ids: list[int], logits: Tensor) -> Any:
    return logits[:-1]


def a_single_number(token_ids: list[int], logits: Tensor) -> Any:
    return logits.max()


def of_no_kind(token_ids: list[int], logits: Tensor) -> Any:
    return "all is well"


def not_finite(token_ids: list[int], logits: Tensor) -> Any:
    logits.fill_(float("nan"))


@pytest.mark.parametrize("function", [broken, of_another_shape, a_single_number, of_no_kind, not_finite])
def test_one_that_breaks_fails_its_own_row(llm: LLM, function: Any) -> None:
    plain = texts(llm, [None])[0]
    failed, other = outputs(llm, [[function], None])
    assert other.outputs[0].token_ids == plain
    assert failed.outputs[0].finish_reason == "error"
    if function is not not_finite:
        assert function.__name__ in str(failed.outputs[0].stop_reason)


class Remembering:
    """Keeps something for its sequence."""

    def __init__(self) -> None:
        self.num_calls = 0

    def clone(self) -> Remembering:
        return Remembering()

    def __call__(self, token_ids: list[int], logits: Tensor) -> None:
        logits[200 + self.num_calls] = 1e4
        self.num_calls += 1


def test_each_sample_has_its_own(llm: LLM) -> None:
    [output] = outputs(llm, [[Remembering()]], n=3)
    assert [one.token_ids for one in output.outputs] == [list(range(200, 206))] * 3


class Unclonable:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def clone(self) -> Any:
        raise self.error

    def __call__(self, token_ids: list[int], logits: Tensor) -> None:
        logits[9] = 1e4


@pytest.mark.parametrize("error", [FileNotFoundError("words.txt"), SystemExit("enough")])
def test_one_that_cannot_be_had_again_ends_its_request_by_name(llm: LLM, error: BaseException) -> None:
    failed, other = outputs(llm, [[Unclonable(error)], [only_seven]], n=2)
    assert failed.outputs[1].finish_reason == "error"
    assert f"logits processor Unclonable: {type(error).__name__}: {error}" in str(failed.outputs[1].stop_reason)
    assert [output.token_ids for output in other.outputs] == [[7] * 6] * 2


def make_only(token: int) -> Any:
    def only(token_ids: list[int], logits: Tensor) -> None:
        chosen = logits[token].clone()
        logits.fill_(float("-inf"))
        logits[token] = chosen

    return only


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "quire.logits_processors"
    points = {
        "only": EntryPoint("only", f"{__name__}:make_only", group),
        "only_seven": EntryPoint("only_seven", f"{__name__}:only_seven", group),
    }
    loaded = {"only": make_only, "only_seven": only_seven}
    monkeypatch.setattr(EntryPoint, "load", lambda self: loaded[self.name])
    for name, point in points.items():
        monkeypatch.setitem(installed(), name, point)


@pytest.mark.usefixtures("named")
def test_names_are_found_and_take_arguments(llm: LLM) -> None:
    found = texts(llm, [["only_seven"], [{"name": "only", "args": {"token": 9}}]])
    assert found == [[7] * 6, [9] * 6]


@pytest.mark.usefixtures("named")
def test_arguments_that_do_not_fit_fail_their_own_row(llm: LLM) -> None:
    plain = texts(llm, [None])[0]
    failed, other = outputs(llm, [[{"name": "only", "args": {"no": 9}}], None])
    assert failed.outputs[0].finish_reason == "error"
    assert "logits processor only: TypeError" in str(failed.outputs[0].stop_reason)
    assert other.outputs[0].token_ids == plain


def make_slow(seconds: float) -> Any:
    def slow(token_ids: list[int], logits: Tensor) -> None:
        spin_until(time.monotonic() + seconds)

    return slow


def make_endless(x: int) -> Any:
    while True:
        pass


@pytest.fixture
def slow_ones(named: None, monkeypatch: pytest.MonkeyPatch) -> None:
    group = "quire.logits_processors"
    loaded = {"slow": make_slow, "endless": make_endless}
    monkeypatch.setattr(EntryPoint, "load", lambda self: loaded[self.name])
    for name in loaded:
        monkeypatch.setitem(installed(), name, EntryPoint(name, f"{__name__}:{name}", group))
    monkeypatch.setattr(call_budget, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(call_budget, "SECONDS_A_CALL", 0.0)


@pytest.mark.usefixtures("slow_ones")
@pytest.mark.parametrize("seconds", [3600.0, 0.08])
def test_one_by_name_that_takes_long_fails_its_own_row(llm: LLM, seconds: float) -> None:
    """At once, or little by little."""
    plain = texts(llm, [None])[0]
    failed, other = outputs(llm, [[{"name": "slow", "args": {"seconds": seconds}}], None])
    assert failed.outputs[0].finish_reason == "error"
    assert "logits processor slow: TooSlowError: it takes too long" in str(failed.outputs[0].stop_reason)
    assert len(failed.outputs[0].token_ids) < 4
    assert other.outputs[0].token_ids == plain
    assert texts(llm, [None])[0] == plain


@pytest.mark.usefixtures("slow_ones")
def test_one_that_is_never_made_fails_its_own_row(llm: LLM) -> None:
    plain = texts(llm, [None])[0]
    failed, other = outputs(llm, [[{"name": "endless", "args": {"x": 1}}], None])
    assert failed.outputs[0].finish_reason == "error"
    assert other.outputs[0].token_ids == plain


def spin_until(end: float) -> None:
    while time.monotonic() < end:
        pass


def test_an_interruption_never_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that end just when their time does: what comes must be TooSlowError, or nothing."""
    monkeypatch.setattr(call_budget, "SECONDS_A_CALL", 0.0)
    num_interrupted = 0
    for number in range(400):
        budget = CallBudget()
        budget._left = 0.0005
        end = time.monotonic() + 0.0005 + (number - 200) * 2e-6
        try:
            budget.call(spin_until, end)
        except TooSlowError:
            num_interrupted += 1
        for _ in range(50):
            time.monotonic()
    assert num_interrupted > 0


def test_an_interruption_that_was_sent_is_waited_for() -> None:
    """The call has ended when it comes: it must come there, not in the code behind."""
    call = call_budget._Call(0.0)
    assert call._end.acquire(blocking=False)

    def send() -> None:
        call_budget._raise_in(call.thread, call_budget._Interruption)
        call._is_interrupted = True

    timer = threading.Timer(0.05, send)
    timer.start()
    with pytest.raises(call_budget._Interruption):
        call.leave()
    timer.join()


def test_a_call_that_is_over_is_not_interrupted() -> None:
    call = call_budget._Call(0.0)
    call.leave()
    call.interrupt()
    assert not call._is_interrupted


def test_one_that_is_interrupted_where_it_ends_leaves_the_others_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_budget, "SECONDS_A_CALL", 0.0)
    for number in range(2_000):
        budget = CallBudget()
        budget._left = 0.0002
        with contextlib.suppress(TooSlowError):
            budget.call(spin_until, time.monotonic() + 0.0002 + (number % 100 - 50) * 1e-6)
    budget._left = 0.01
    end = time.monotonic() + 60.0
    with pytest.raises(TooSlowError):
        budget.call(spin_until, end)
    assert time.monotonic() < end


@pytest.mark.usefixtures("slow_ones")
def test_samples_of_a_request_have_one_budget() -> None:
    first = OwnProcessor({"name": "slow", "args": {"seconds": 0.08}}, CallBudget())
    others = [first.of_child() for _ in range(2)]
    first.apply([], [], torch.zeros(3))
    others[0].apply([], [], torch.zeros(3))
    with pytest.raises(TooSlowError):
        others[1].apply([], [], torch.zeros(3))


@pytest.mark.usefixtures("slow_ones")
def test_no_time_decides_where_workers_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OwnProcessor({"name": "slow", "args": {"seconds": 0.08}}, EqualBudget())
    for _ in range(4):
        one.apply([], [], torch.zeros(3))
    monkeypatch.setattr(call_budget, "SECONDS_OF_RANKS", 0.1)
    with pytest.raises(TooSlowError):
        OwnProcessor({"name": "endless", "args": {"x": 1}}, EqualBudget())


def test_several_workers_have_no_budget_of_time() -> None:
    budgets = []
    for is_alone in (True, False):
        processors = built_in_processors(RowTable(1, 64), beside=BesideSteps(1, is_alone=is_alone))
        [own] = [one._rule for one in processors if isinstance(getattr(one, "_rule", None), OwnProcessors)]
        budgets.append(type(own._new_budget()))
    assert budgets == [CallBudget, EqualBudget]


@pytest.mark.parametrize(
    "asked", [{"name": "a", "args": {"x": "y" * 20_000}}, {"name": "a", "args": {"x": [[0] * 20_000]}}, "a" * 101]
)
def test_what_is_sent_along_is_bounded(asked: Any) -> None:
    with pytest.raises(RequestError, match="logits_processors") as caught:
        SamplingParams(logits_processors=[asked])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("asked", [["nobody"], "only", [3], [{"name": 3}], [{"name": "a", "more": 1}]])
def test_what_is_none_is_refused(llm: LLM, asked: Any) -> None:
    with pytest.raises(RequestError, match="logits_processors"):
        outputs(llm, [asked])


def test_functions_do_not_cross_a_process(tmp_path: Path) -> None:
    from quire.testing.fake_llm import fake_llm

    with fake_llm(own_process=True) as llm, pytest.raises(RequestError, match="another process"):
        outputs(llm, [[only_seven]])
