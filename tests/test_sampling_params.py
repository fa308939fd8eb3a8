"""A parameter that cannot be is refused with its name, whatever its type."""

from __future__ import annotations

import numpy as np
import pytest

from quire.errors import RequestError
from quire.message_encoding import decode_to_core, encode
from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", float("nan")), ("temperature", "1"), ("top_p", 0), ("top_p", 1.5),
        ("top_k", 1.5), ("min_p", 2), ("n", 0), ("n", 10**6), ("n", True), ("max_tokens", 0), ("min_tokens", -1),
        ("presence_penalty", 2.01), ("repetition_penalty", 0), ("seed", 2**64), ("logprobs", -2), ("stop", 5),
        ("stop", [""]), ("stop", ["a"] * 17), ("stop_token_ids", 5), ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("bad_words", 5), ("allowed_token_ids", []), ("allowed_token_ids", 5), ("logit_bias", [1]),
        ("logit_bias", {1: 101}), ("logit_bias", {"a": 1}), ("logit_bias", {1: 10**400}), ("temperature", 10**400),
        ("ignore_eos", None), ("ignore_eos", 1), ("skip_special_tokens", "x"), ("include_stop_str_in_output", 0),
        ("detokenize", None), ("detokenize", np.int64(1)), ("stop", "a\ud800"), ("bad_words", ["\udfff"]),
        ("stop_token_ids", np.int64(3)), ("stop_token_ids", [[1]]), ("n", np.array([1, 2])), ("n", np.bool_(True)),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_field(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_a_misspelt_parameter_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(RequestError, match=r'temprature: there is no such parameter\. Did you mean "temperature"\?'):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "advice"), [("best_of", "Give n"), ("use_beam_search", "BeamSearchParams"), ("cache_salt", "prompt")]
)
def test_what_is_looked_for_here_is_answered_with_its_place(name: str, advice: str) -> None:
    with pytest.raises(RequestError, match=rf"{name}: there is no such parameter\. .*{advice}"):
        SamplingParams(**{name: 2})


def test_one_text_stands_for_a_list_of_one() -> None:
    assert SamplingParams(stop="ab", bad_words="cd").replace(n=2).bad_words == ["cd"]


def test_it_crosses_a_socket_unchanged() -> None:
    sampling = SamplingParams(n=3, stop=["a"], logit_bias={4: -1.5}, seed=-7, max_tokens=None)
    message = EngineRequest(request_id=1, prompt_token_ids=[1], sampling=sampling)
    assert decode_to_core(encode(message)) == message


def test_values_of_numpy_become_pythons_own() -> None:
    given = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_p=np.float64(0.5),
        seed=np.uint64(7),
        stop=np.str_("a"),
        bad_words=[np.str_("b")],
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=[np.int32(3)],
        logit_bias={np.int64(4): np.float64(1.5)},
        ignore_eos=np.bool_(True),
        detokenize=np.bool_(True),
    )
    plain = SamplingParams(
        n=2, temperature=0.5, top_p=0.5, seed=7, stop=["a"], bad_words=["b"], stop_token_ids=[1, 2],
        allowed_token_ids=[3], logit_bias={4: 1.5}, ignore_eos=True,
    )  # fmt: skip
    assert repr(given) == repr(plain)
    message = EngineRequest(request_id=1, prompt_token_ids=[1], sampling=given)
    assert decode_to_core(encode(message)).sampling == plain


def test_a_misspelt_change_is_answered_like_a_misspelt_parameter():
    with pytest.raises(RequestError, match=r'temprature: there is no such parameter\. Did you mean "temperature"'):
        SamplingParams().replace(temprature=1)
