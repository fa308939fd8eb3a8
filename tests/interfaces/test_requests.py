"""The table of checks: each row of bad input, its error, and the request that good input becomes."""

from types import SimpleNamespace

import numpy as np
import pytest

from quire.beam_search_params import BeamSearchParams
from quire.errors import ContextLengthError, RequestError
from quire.interfaces.prompts import is_token_ids
from quire.interfaces.requests import Limits, RequestMaker
from quire.messages import DecodingSpec
from quire.sampling_params import SamplingParams
from quire.thought_marks import ThoughtMarks

MARKS = ThoughtMarks(opening=5, closing=6)
LIMITS = Limits(vocab_size=100, max_model_len=32, max_logprobs=5, max_num_seqs=8)


def maker(seed: int = 0) -> RequestMaker:
    return RequestMaker(
        LIMITS,
        eos_token_ids=[2, 3],
        seed=seed,
        bad_words_token_ids=lambda words: [[len(word)] for word in words],
        thought_marks=lambda: MARKS,
    )


PICTURE = SimpleNamespace(is_vectors=False)
VECTORS = SimpleNamespace(is_vectors=True)
BAD = [
    ([], {}, {}, "prompt", "no tokens"),
    ([1, 100], {}, {}, "prompt", r"prompt_token_ids\[1\]=100.*between 0 and 99"),
    ([1, -1], {}, {}, "prompt", r"prompt_token_ids\[1\]=-1"),
    ([2**63], {}, {}, "prompt", "9223372036854775808"),
    ([1, 2.0], {}, {}, "prompt", r"\[1\]=2.0"),
    ([1, "2"], {}, {}, "prompt", r"\[1\]='2'"),
    ([1, True], {}, {}, "prompt", r"\[1\]=True"),
    ([1, None], {}, {}, "prompt", r"\[1\]=None"),
    ([1], {"logprobs": 6}, {}, "logprobs", "at most 5"),
    ([1], {"prompt_logprobs": 6}, {}, "prompt_logprobs", "at most 5"),
    ([1], {"stop_token_ids": [99, 100]}, {}, "stop_token_ids", "token 100 is not in the vocabulary"),
    ([1], {"stop_token_ids": [2**64]}, {}, "stop_token_ids", "not in the vocabulary"),
    ([1], {"allowed_token_ids": [100]}, {}, "allowed_token_ids", "not in the vocabulary"),
    ([1], {"logit_bias": {100: 1.0}}, {}, "logit_bias", "not in the vocabulary"),
    ([1], {"logit_bias": {-1: 1.0}}, {}, "logit_bias", "not in the vocabulary"),
    ([1], {"bad_words": ["a"] * 129}, {}, "bad_words", "129 entries, at most 128"),
    ([1], {"logit_bias": dict.fromkeys(range(1025), 1.0)}, {}, "logit_bias", "1025 entries, at most 1024"),
    ([1], {"stop_token_ids": [1] * 1025}, {}, "stop_token_ids", "1025 entries, at most 1024"),
    ([1], {"stop": ["a" * 1025]}, {}, "stop", "1025 characters, at most 1024"),
    ([1], {"bad_words": ["a" * 1025]}, {}, "bad_words", "1025 characters, at most 1024"),
    ([1], {"n": 9}, {}, "n", "n=9: at most 8 sequences"),
    ([1], {}, {"priority": 10**30}, "priority", "between -2147483648 and 2147483647"),
    ([1], {}, {"priority": -(2**31) - 1}, "priority", "whole number"),
    ([1], {}, {"priority": 1.5}, "priority", "whole number"),
    ([1], {}, {"priority": True}, "priority", "whole number"),
    ([1], {}, {"cache_salt": 5}, "cache_salt", "cache_salt=5: must be a text"),
    ([1], {}, {"cache_salt": b"x"}, "cache_salt", "must be a text"),
    ([1], {}, {"cache_salt": "\ud800"}, "cache_salt", "lone surrogate"),
    ([1], {}, {"media": [PICTURE], "num_kept_tokens": 1}, "multi_modal_data", "take text only"),
    ([1], {}, {"media": [VECTORS], "num_kept_tokens": 1}, "prompt_embeds", "take text only"),
    ([1], {}, {"media": [VECTORS], "pooling": "last"}, "prompt_embeds", "take text only"),
    ([1], {"prompt_logprobs": 1}, {"media": [VECTORS]}, "prompt_logprobs", "not compatible with prompt_embeds"),
    ([1], {"repetition_penalty": 1.5}, {"media": [VECTORS]}, "repetition_penalty", "not compatible"),
    ([1], {"watermarking": True}, {}, "watermarking", "has no watermark"),
]


@pytest.mark.parametrize(("prompt", "sampling", "other", "param", "text"), BAD)
def test_bad_input_is_refused_by_name(prompt, sampling, other, param, text):
    with pytest.raises(RequestError, match=text) as caught:
        maker().make(prompt, SamplingParams(**sampling), **other)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("num_prompt", "min_tokens", "fits"), [(31, 0, True), (32, 0, False), (33, 0, False), (28, 4, True), (28, 5, False)]
)
def test_prompt_and_output_must_fit(num_prompt: int, min_tokens: int, fits: bool):
    sampling = SamplingParams(min_tokens=min_tokens)
    if fits:
        assert maker().make([1] * num_prompt, sampling).sampling.max_tokens == 32 - num_prompt
        return
    with pytest.raises(ContextLengthError, match=r"maximum context length is 32 tokens\. However, ") as caught:
        maker().make([1] * num_prompt, sampling)
    assert caught.value.code == "context_length_exceeded"


BAD_BEAMS = [
    ([1], {"beam_width": 9}, "beam_width", "beam_width=9: at most 8 sequences.*Lower beam_width"),
    ([1], {"logprobs": 6}, "logprobs", "at most 5"),
    ([1], {"stop_token_ids": [100]}, "stop_token_ids", "token 100 is not in the vocabulary"),
    ([1], {"stop_token_ids": [1] * 1025}, "stop_token_ids", "1025 entries, at most 1024"),
    ([1] * 32, {}, "prompt", "maximum context length is 32"),
    ([100], {}, "prompt", r"prompt_token_ids\[0\]=100"),
]


@pytest.mark.parametrize(("prompt", "params", "param", "text"), BAD_BEAMS)
def test_beams_pass_through_the_same_checks(prompt, params, param, text):
    with pytest.raises(RequestError, match=text) as caught:
        maker().make(prompt, BeamSearchParams(**{"beam_width": 4, **params}))
    assert caught.value.param == param


def test_a_request_for_beams():
    request = maker().make([1] * 10, BeamSearchParams(beam_width=4, num_return_sequences=2, max_tokens=None))
    assert (request.sampling.n, request.sampling.max_tokens, request.sampling.logprobs) == (2, 22, 0)
    args = {"width": 4, "length_penalty": 1.0, "early_stopping": False}
    assert request.decoding == DecodingSpec(method="beam_search", args=args)
    assert request.eos_token_ids == [2, 3]
    assert maker().make([1], BeamSearchParams(beam_width=4, ignore_eos=True)).eos_token_ids == []
    assert maker().make([1], SamplingParams()).decoding is None


def test_beams_that_look_through_too_much_are_refused():
    limits = Limits(vocab_size=10**5, max_model_len=32, max_logprobs=5, max_num_seqs=128)
    requests = RequestMaker(
        limits, eos_token_ids=[2, 3], bad_words_token_ids=lambda words: [], thought_marks=lambda: MARKS
    )
    most = BeamSearchParams(beam_width=128, stop_token_ids=list(range(2, 386)))
    assert requests.make([1], most).sampling.n == 128
    for one_more in (most.replace(stop_token_ids=list(range(386))), most.replace(stop_token_ids=list(range(4, 387)))):
        with pytest.raises(RequestError, match=r"with 38[56] tokens that end a beam.*at most 65536") as caught:
            requests.make([1], one_more)
        assert caught.value.param == "beam_width"
    # the model's own ends count only if they end
    requests.make([1], most.replace(stop_token_ids=list(range(4, 388)), ignore_eos=True))
    # nobody looks through more than there is
    small = Limits(vocab_size=500, max_model_len=32, max_logprobs=5, max_num_seqs=128)
    RequestMaker(small, bad_words_token_ids=lambda words: []).make([1], most.replace(stop_token_ids=list(range(500))))


def test_no_salt_is_none():
    assert maker().make([1], SamplingParams(), cache_salt=None).cache_salt == ""
    assert type(maker().make([1], SamplingParams(), cache_salt=np.str_("a")).cache_salt) is str


def test_parameters_of_another_kind_are_refused():
    with pytest.raises(RequestError, match="must be SamplingParams or BeamSearchParams"):
        maker().make([1], {"temperature": 1})


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_whole_numbers_of_numpy_are_tokens(kind):
    token_ids = maker().make([1, kind(99)], SamplingParams()).prompt_token_ids
    assert token_ids == [1, 99]
    assert {type(token) for token in token_ids} == {int}
    assert is_token_ids([kind(1)])
    with pytest.raises(RequestError, match=r"\[0\]=100"):
        maker().make([kind(100)], SamplingParams())
    for other in (np.float32(1), np.bool_(True)):
        with pytest.raises(RequestError, match="must be a whole number"):
            maker().make([other], SamplingParams())


def test_a_refused_request_takes_no_number():
    requests = maker()
    with pytest.raises(RequestError):
        requests.make([], SamplingParams())
    assert [requests.make([1], SamplingParams()).request_id for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(("asked", "got"), [(None, 22), (5, 5), (22, 22), (1000, 22)])
def test_max_tokens_never_exceeds_the_room(asked, got):
    assert maker().make([1] * 10, SamplingParams(max_tokens=asked)).sampling.max_tokens == got


def test_the_users_object_is_left_alone():
    sampling = SamplingParams(max_tokens=None, stop_token_ids=[5])
    request = maker().make([1], sampling)
    sampling.stop_token_ids.append(6)
    assert sampling.max_tokens is None
    assert request.sampling.stop_token_ids == [5]


def test_what_ends_a_sequence():
    assert maker().make([1], SamplingParams()).eos_token_ids == [2, 3]
    assert maker().make([1], SamplingParams(ignore_eos=True)).eos_token_ids == []
    assert maker().make([1], SamplingParams(bad_words=["abc"])).bad_words_token_ids == [[3]]


def test_marks_are_looked_for_where_thoughts_are_counted():
    assert maker().make([1], SamplingParams(thinking_token_budget=0)).thought_marks == MARKS
    assert maker().make([1], SamplingParams()).thought_marks is None
    with pytest.raises(RequestError, match="thinking_token_budget"):
        RequestMaker(LIMITS, bad_words_token_ids=lambda words: []).make([1], SamplingParams(thinking_token_budget=0))


def test_seeds_follow_from_the_engines_seed_and_the_number():
    def seeds(requests: RequestMaker) -> list[int]:
        return [requests.make([1], SamplingParams()).seed for _ in range(1000)]

    first, again, other = seeds(maker(seed=1)), seeds(maker(seed=1)), seeds(maker(seed=2))
    assert first == again
    assert len({*first, *other}) == 2000
    assert all(0 <= seed < 2**63 for seed in first)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**64 - 1, -1, -(2**63)])
def test_a_seed_that_was_asked_for_is_kept_in_63_bits(seed: int):
    request = maker().make([1], SamplingParams(seed=seed))
    assert request.seed == seed % 2**63


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        (BeamSearchParams(beam_width=2), "beam_width", 1000),
        (BeamSearchParams(beam_width=2), "length_penalty", "long"),
        (BeamSearchParams(beam_width=2), "early_stopping", "soon"),
        (BeamSearchParams(beam_width=2), "num_beam_groups", 2),
        (BeamSearchParams(beam_width=2), "num_return_sequences", 3),
        (SamplingParams(), "n", "two"),
        (SamplingParams(), "top_p", 0),
        (SamplingParams(), "logit_bias", {"a": 1.0}),
    ],
)
def test_what_was_changed_after_it_was_made_is_checked_again(params, field, value):
    setattr(params, field, value)
    with pytest.raises(RequestError, match=field) as caught:
        maker().make([1], params)
    assert caught.value.param == field


def test_what_is_set_later_is_taken_and_stays_the_users_own():
    params = SamplingParams()
    params.stop, params.bad_words, params.max_tokens = "end", None, None
    request = maker().make([1], params)
    assert (request.sampling.stop, request.sampling.bad_words, request.sampling.max_tokens) == (["end"], [], 31)
    assert (params.stop, params.max_tokens) == ("end", None)
    params.stop_token_ids.append(7)
    assert request.sampling.stop_token_ids == []
