"""Log-probabilities of chats and completions."""

from __future__ import annotations

import json
import math
from typing import Any

from conformance.registry import check, check_each
from conformance.target import PROMPT, Target


def chat_scores(target: Target, **fields: Any) -> tuple[Any, list[Any]]:
    choice = target.post_chat(logprobs=True, **fields).json["choices"][0]
    return choice, choice["logprobs"]["content"]


def columns(target: Target, **fields: Any) -> tuple[Any, Any]:
    choice = target.post_completion(**fields).json["choices"][0]
    return choice, choice["logprobs"]


@check
def fields_of_a_score(target: Target) -> None:
    """A score has token, logprob, bytes and top_logprobs; logprobs has refusal: null."""
    choice, content = chat_scores(target, top_logprobs=2)
    assert choice["logprobs"]["refusal"] is None
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert isinstance(entry["token"], str)
        assert entry["logprob"] <= 0
        assert all(type(byte) is int and 0 <= byte < 256 for byte in entry["bytes"])


@check
def one_score_a_token(target: Target) -> None:
    """As many scores as completion tokens."""
    reply = target.post_chat(logprobs=True).json
    assert len(reply["choices"][0]["logprobs"]["content"]) == reply["usage"]["completion_tokens"]


@check_each({str(number): number for number in (0, 1, 5, 20)})
def so_many_best_tokens(target: Target, row: object) -> None:
    """So many top_logprobs, sorted:"""
    _, content = chat_scores(target, top_logprobs=row)
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == row
        assert values == sorted(values, reverse=True)


@check
def the_best_token_of_a_greedy_answer(target: Target) -> None:
    """At temperature 0 the chosen token is the best one."""
    _, content = chat_scores(target, top_logprobs=1)
    for entry in content:
        assert entry["token"] == entry["top_logprobs"][0]["token"]
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]


@check
def a_score_does_not_depend_on_the_others(target: Target) -> None:
    """The chosen token's logprob is the same for any top_logprobs."""
    few, many = (chat_scores(target, top_logprobs=number)[1] for number in (0, 5))
    assert all(abs(one["logprob"] - other["logprob"]) < 0.05 for one, other in zip(few, many, strict=True))


@check
def bytes_join_to_the_text(target: Target) -> None:
    """The bytes of all tokens, joined, are the content."""
    choice, content = chat_scores(target, max_completion_tokens=4)
    text = bytes(byte for entry in content for byte in entry["bytes"]).decode(errors="replace")
    # the token that ends an answer has bytes, and is no part of the text
    assert text.startswith(choice["message"]["content"]), (text, choice["message"]["content"])


@check
def a_character_of_several_tokens(target: Target) -> None:
    """Tokens that are parts of one character have its bytes."""
    text = "\U0001f9d1\u200d\U0001f680 𝕏 \ufdfd"
    _, found = columns(target, prompt=text, echo=True, logprobs=0, max_tokens=1)
    begin = [offset for offset in found["text_offset"] if offset < len(text)]
    assert begin == sorted(begin)
    assert begin[0] == 0


@check
def no_number_that_json_lacks(target: Target) -> None:
    """Minus infinity is -9999.0; nothing is NaN or Infinity."""
    reply = target.post_completion(logprobs=5, logit_bias={"300": 100}, max_tokens=3)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    body = json.loads(reply.body, parse_constant=refuse)
    values = [value for top in body["choices"][0]["logprobs"]["top_logprobs"] for value in top.values()]
    assert all(math.isfinite(value) and value >= -9999.0 for value in values)


@check
def columns_of_a_completion(target: Target) -> None:
    """tokens, token_logprobs, top_logprobs and text_offset have one entry a token."""
    body = target.post_completion(logprobs=2).json
    found = body["choices"][0]["logprobs"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(found[name]) == body["usage"]["completion_tokens"], name
    assert all(2 <= len(top) <= 3 for top in found["top_logprobs"])


@check
def logprobs_of_zero(target: Target) -> None:
    """logprobs=0 gives the chosen token alone."""
    _, found = columns(target, logprobs=0)
    assert all(len(top or {}) <= 1 for top in found["top_logprobs"])
    assert all(value <= 0 for value in found["token_logprobs"])


@check
def the_prompt_alone(target: Target) -> None:
    """echo with max_tokens=0: the prompt and its scores, and no completion tokens."""
    body = target.post_completion(echo=True, max_tokens=0, logprobs=1).json
    (choice,) = body["choices"]
    assert choice["text"] == PROMPT
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0


@check
def offsets_in_characters(target: Target) -> None:
    """text_offset counts characters: each token stands where it says."""
    text = "Grüße, Zoë: naïve café"
    choice, found = columns(target, prompt=text, echo=True, logprobs=0, max_tokens=4)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if "\ufffd" not in token and choice["text"][offset:]:
            assert choice["text"].startswith(token, offset), (token, offset)


@check
def no_logprobs_unless_asked(target: Target) -> None:
    """logprobs is null unless asked for, also with logprobs=false."""
    assert target.post_chat(logprobs=False).json["choices"][0]["logprobs"] is None
    assert target.post_completion().json["choices"][0]["logprobs"] is None
