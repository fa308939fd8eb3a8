"""BeamSearchParams: what is refused by name, and what the engine core gets."""

import math

import numpy as np
import pytest

from quire import BeamSearchParams, RequestError
from quire.beam_search_params import _nearest_divisor
from quire.engine_core.decoding import make_method
from quire.message_encoding import decode_to_core, encode
from quire.messages import DecodingSpec, EngineRequest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0), ("beam_width", 129), ("beam_width", 2.0), ("beam_width", True), ("max_tokens", 0),
        ("temperature", -1), ("temperature", float("nan")), ("length_penalty", 11), ("length_penalty", "1"),
        ("length_penalty", float("inf")), ("early_stopping", "always"), ("early_stopping", 1), ("early_stopping", None),
        ("stop_token_ids", [-1]), ("stop_token_ids", 5), ("logprobs", -1), ("num_return_sequences", 0),
        ("num_return_sequences", 5), ("num_beam_groups", 3), ("num_beam_groups", 8), ("num_beam_groups", 0),
        ("ignore_eos", None), ("ignore_eos", 1), ("skip_special_tokens", "x"), ("early_stopping", np.array([1, 2])),
        ("num_beam_groups", 2), ("diversity_penalty", -1), ("diversity_penalty", 0.5), ("top_p", 0.0), ("top_p", "x"),
        ("repetition_penalty", 0.0), ("presence_penalty", 3), ("frequency_penalty", -3), ("top_k", -2), ("seed", 1.5),
        ("do_sample", 1),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_field(name: str, value: object):
    with pytest.raises(RequestError, match=name) as caught:
        BeamSearchParams(**{"beam_width": 4, name: value})
    assert caught.value.param == name


def test_a_misspelt_parameter_is_answered_with_the_one_that_was_meant():
    with pytest.raises(RequestError, match=r'beam_with: there is no such parameter\. Did you mean "beam_width"\?'):
        BeamSearchParams(beam_with=4)
    with pytest.raises(RequestError, match="min_p: there is no such parameter"):
        BeamSearchParams(beam_width=4, min_p=0.5)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("n", "num_return_sequences"), ("num_beams", "beam_width"), ("stop", "stop_token_ids"), ("cache_salt", "prompt")],
)
def test_what_is_looked_for_here_is_answered_with_its_place(name: str, advice: str):
    with pytest.raises(RequestError, match=rf"{name}: there is no such parameter\. .*{advice}"):
        BeamSearchParams(beam_width=4, **{name: "x"})


@pytest.mark.parametrize(
    "extremes",
    [
        {"length_penalty": -10.0}, {"length_penalty": 10.0}, {"beam_width": 128},
        {"num_beam_groups": 4, "diversity_penalty": 50.0},
        {"beam_width": 128, "num_beam_groups": 128, "diversity_penalty": 50},
    ],
)  # fmt: skip
def test_what_is_allowed_here_the_core_takes(extremes: dict[str, float]):
    params = BeamSearchParams(**{"beam_width": 4, **extremes})
    make_method(
        EngineRequest(
            request_id=1, prompt_token_ids=[1], sampling=params.sampling_params(), decoding=params.decoding_spec()
        )
    )
    for name in {"length_penalty", "diversity_penalty"} & extremes.keys():
        with pytest.raises(RequestError, match=name):
            params.replace(**{name: 1.01 * extremes[name]})


def test_groups_that_do_not_divide_the_width_are_answered_with_ones_that_do():
    with pytest.raises(RequestError, match=r"num_beam_groups=4: must divide beam_width=6, .*Take 3, or another"):
        BeamSearchParams(beam_width=6, num_beam_groups=4, diversity_penalty=1.0)
    assert [_nearest_divisor(12, wanted) for wanted in (5, 7, 8, 11, 128)] == [4, 6, 6, 12, 12]


def test_all_beams_are_returned_unless_fewer_are_asked_for():
    assert BeamSearchParams(beam_width=4).n == 4
    assert BeamSearchParams(beam_width=4, num_return_sequences=2).n == 2
    assert BeamSearchParams(beam_width=4).replace(beam_width=2).n == 2


def test_what_the_core_is_told():
    params = BeamSearchParams(
        beam_width=4,
        max_tokens=None,
        ignore_eos=True,
        temperature=0.5,
        length_penalty=2,
        early_stopping="never",
        stop_token_ids=[7],
        num_return_sequences=3,
        skip_special_tokens=False,
    )
    sampling = params.sampling_params()
    assert (sampling.n, sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (3, None, True, 0.5)
    assert (sampling.stop_token_ids, sampling.skip_special_tokens) == ([7], False)
    assert sampling.logprobs == 0, "the sum over the chosen tokens is the score, also if nobody asked for more"
    args = {"width": 4, "length_penalty": 2.0, "early_stopping": "never"}
    assert params.decoding_spec() == DecodingSpec(method="beam_search", args=args)


def test_groups_are_a_method_of_their_own():
    params = BeamSearchParams(beam_width=4, num_beam_groups=2, diversity_penalty=1, logprobs=5)
    args = {"width": 4, "length_penalty": 1.0, "early_stopping": False, "num_groups": 2, "diversity_penalty": 1.0}
    assert params.decoding_spec() == DecodingSpec(method="diverse_beam_search", args=args)
    assert params.sampling_params().logprobs == 5


def test_it_crosses_a_socket_unchanged():
    params = BeamSearchParams(beam_width=2, early_stopping="never")
    message = EngineRequest(
        request_id=1, prompt_token_ids=[1], sampling=params.sampling_params(), decoding=params.decoding_spec()
    )
    assert decode_to_core(encode(message)) == message


def test_the_score_is_the_sum_over_a_power_of_the_length():
    assert BeamSearchParams(beam_width=2).score(-6.0, 4) == -1.5
    assert BeamSearchParams(beam_width=2, length_penalty=0.0).score(-6.0, 4) == -6.0
    assert BeamSearchParams(beam_width=2, length_penalty=2.0).score(-8.0, 4) == -0.5
    assert BeamSearchParams(beam_width=2, length_penalty=-1.0).score(-2.0, 4) == -8.0
    assert BeamSearchParams(beam_width=2).score(0.0, 0) == -math.inf


def test_values_of_numpy_become_pythons_own():
    given = BeamSearchParams(
        beam_width=np.int64(2), length_penalty=np.float64(0.5), early_stopping=np.bool_(True), ignore_eos=np.bool_(True)
    )
    plain = BeamSearchParams(beam_width=2, length_penalty=0.5, early_stopping=True, ignore_eos=True)
    assert repr(given) == repr(plain)
    assert repr(given.decoding_spec()) == repr(plain.decoding_spec())
    assert repr(BeamSearchParams(beam_width=2, early_stopping=np.str_("never")).early_stopping) == "'never'"


def test_a_misspelt_change_is_answered_like_a_misspelt_parameter():
    with pytest.raises(RequestError, match=r'beam_with: there is no such parameter\. Did you mean "beam_width"'):
        BeamSearchParams(beam_width=2).replace(beam_with=1)
