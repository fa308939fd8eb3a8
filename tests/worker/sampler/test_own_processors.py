"""Logits processors that do not come with Quire: by function and by name; what one breaks is its own row."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.logits_processors import installed
from quire.outputs import RequestOutput


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
    prompt = llm.get_tokenizer().encode("Once upon a time")
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


def of_no_kind(token_ids: list[int], logits: Tensor) -> Any:
    return "all is well"


def not_finite(token_ids: list[int], logits: Tensor) -> Any:
    logits.fill_(float("nan"))


@pytest.mark.parametrize("function", [broken, of_another_shape, of_no_kind, not_finite])
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
    assert other.outputs[0].token_ids == plain


@pytest.mark.parametrize("asked", [["nobody"], "only", [3], [{"name": 3}], [{"name": "a", "more": 1}]])
def test_what_is_none_is_refused(llm: LLM, asked: Any) -> None:
    with pytest.raises(RequestError, match="logits_processors"):
        outputs(llm, [asked])


def test_functions_do_not_cross_a_process(tmp_path: Path) -> None:
    from quire.testing.fake_llm import fake_llm

    with fake_llm(own_process=True) as llm, pytest.raises(RequestError, match="another process"):
        outputs(llm, [[only_seven]])
