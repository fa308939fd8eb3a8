"""/v1/embeddings through the official client."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import openai

from conformance.registry import Skip, check
from conformance.target import Target

TEXTS = ["A little dog.", "The sea is blue.", "Once upon a time"]


def embed(target: Target, **fields: Any) -> Any:
    try:
        return target.client.embeddings.create(**{"model": target.model, "input": TEXTS, **fields})
    except openai.NotFoundError as error:
        raise Skip("the server has no /v1/embeddings") from error


def vectors(target: Target, **fields: Any) -> list[list[float]]:
    return [one.embedding for one in embed(target, encoding_format="float", **fields).data]


def are_close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(math.isclose(a, b, abs_tol=2e-2) for a, b in zip(one, other, strict=True))


@check
def fields_of_embeddings(target: Target) -> None:
    """object list, data with object, index and embedding, model and usage."""
    reply = target.post("/v1/embeddings", {"model": target.model, "input": TEXTS})
    if reply.status == 404:
        raise Skip("the server has no /v1/embeddings")
    body = reply.json
    assert body["object"] == "list"
    assert [one["object"] for one in body["data"]] == ["embedding"] * 3
    assert [one["index"] for one in body["data"]] == [0, 1, 2]
    assert body["model"] == target.model
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 3


@check
def base64_is_the_same(target: Target) -> None:
    """encoding_format base64: the same numbers as 32-bit floats."""
    body = target.post("/v1/embeddings", {"model": target.model, "input": TEXTS[0], "encoding_format": "base64"})
    if body.status == 404:
        raise Skip("the server has no /v1/embeddings")
    data = base64.b64decode(body.json["data"][0]["embedding"])
    assert are_close(list(struct.unpack(f"<{len(data) // 4}f", data)), vectors(target, input=TEXTS[0])[0])


@check
def what_the_client_asks_for(target: Target) -> None:
    """The client asks for base64 by itself and gives numbers."""
    assert are_close(embed(target).data[1].embedding, vectors(target)[1])


@check
def a_text_alone_or_in_a_list(target: Target) -> None:
    """A text has the same vector alone, in a list, and in another order."""
    alone = [vectors(target, input=text)[0] for text in TEXTS]
    for vector, one in zip(vectors(target, input=TEXTS[::-1]), alone[::-1], strict=True):
        assert are_close(vector, one)


@check
def tokens_have_vectors(target: Target) -> None:
    """Token ids are taken, alone and as lists."""
    (one,) = vectors(target, input=[5, 6, 7])
    assert are_close(vectors(target, input=[[5, 6, 7], [8]])[0], one)


@check
def an_empty_text(target: Target) -> None:
    """400 for an empty input."""
    try:
        embed(target, input=[])
    except openai.BadRequestError as error:
        assert error.param == "input", error.param
    else:
        raise AssertionError("no error")
