"""POST /v2/embed: vectors of texts in Cohere's words.

A request becomes one of /v1/embeddings, and its vectors the lists of an answer of Cohere's; nothing is computed here.
What a model's authors want before a query or a document stands in config_sentence_transformers.json.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType
from starlette.datastructures import State

from quire.interfaces.own_pooling import own_prompts
from quire.interfaces.server.access.caller import new_id
from quire.interfaces.server.endpoint import Endpoint
from quire.interfaces.server.openai.embeddings import EmbeddingRequest, EmbeddingWork, prepare_embeddings
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.pooling_work import MAX_INPUTS
from quire.interfaces.server.openai.rendering import LEFT, RIGHT, check_repeated
from quire.interfaces.server.openai.vector_bytes import Vector, as_bytes
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import in_words_of, invalid, not_one_of
from quire.interfaces.server.wire.field_rules import Refused, text_in

router = APIRouter()
FLOAT = "float"
_NEVER = "NONE"
_SIDES = {"START": LEFT, "END": RIGHT}
# Cohere's own, and what authors of other models call the same
_INPUT_TYPES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


def _bits(vector: Vector) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One of each number that is not negative, eight a byte, the first one highest."""
    if len(vector) % 8:
        text = f"a vector of {len(vector)} numbers makes no whole bytes; set output_dimension to a multiple of 8"
        raise invalid(f"embedding_types: {text}, or ask for float.", "embedding_types")
    return np.packbits(vector >= 0)


_FORMS: dict[str, Callable[[Vector], Any]] = {
    FLOAT: lambda vector: vector.tolist(),
    "binary": lambda vector: (_bits(vector).astype(np.int16) - 128).tolist(),
    "ubinary": lambda vector: _bits(vector).tolist(),
    "base64": lambda vector: base64.b64encode(as_bytes(vector, None, None)).decode(),
}


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """A request for vectors. One of texts and inputs."""

    model: Annotated[str | None, Meta(description="name of the served model; may be left out")] = None
    texts: Annotated[list[str] | None, Meta(description="texts, at most 2,048")] = None
    inputs: Annotated[
        list[dict[str, Any]] | None, Meta(description="the same as parts: one text of each, its parts in lines")
    ] = None
    input_type: Annotated[
        str | None,
        Meta(description="what the texts are for: the model's authors say what stands before such a text; Cohere's own "
             "types change nothing for a model that knows none"),
    ] = None  # fmt: skip
    embedding_types: Annotated[list[str] | None, Meta(description="float (default), binary, ubinary, base64")] = None
    output_dimension: Annotated[int | None, Meta(description="so many of the first numbers")] = None
    max_tokens: Annotated[int | None, Meta(description="so many tokens of each text count")] = None
    truncate: Annotated[
        str | None, Meta(description="END (default) or START: where a text that is too long is cut; NONE refuses it")
    ] = None
    priority: Annotated[int | None, Meta(description="vLLM's: lower is served first, with the policy priority")] = None


RULES = rules_for(CohereEmbedRequest, {"images": Refused("vectors are of texts", ([],))})


class ApiVersion(msgspec.Struct):
    """Of Cohere's API."""

    version: str = "2"


class BilledUnits(msgspec.Struct):
    """What was read."""

    input_tokens: int
    image_tokens: int = 0


class CohereMeta(msgspec.Struct):
    """Beside the vectors."""

    billed_units: BilledUnits
    api_version: ApiVersion = msgspec.field(default_factory=ApiVersion)


class CohereVectors(msgspec.Struct, rename={"floats": FLOAT}):
    """By the types that were asked for; in each the vectors of the texts in their order."""

    floats: list[list[float]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class CohereEmbedAnswer(msgspec.Struct):
    """The answer of /v2/embed."""

    id: str
    embeddings: CohereVectors
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"


@router.post("/v2/embed", openapi_extra=described(request=CohereEmbedRequest, answer=CohereEmbedAnswer))
async def cohere_embed(request: Request) -> Response:
    """Vectors of texts, in Cohere's words."""
    return await ENDPOINT.respond(request)


async def _answer(body: CohereEmbedRequest, state: State) -> CohereWork:
    model: ServedModel = await state.models.named(body.model)
    kinds = list(dict.fromkeys(body.embedding_types or [FLOAT]))
    for kind in kinds:
        if kind not in _FORMS:
            raise not_one_of("embedding_types", kind, _FORMS)
    given = _texts_of(body)
    prefix = _prefix_of(body.input_type, model)
    if prefix:
        check_repeated(prefix, len(given), "input_type", "texts")
    asked = EmbeddingRequest(
        input=[prefix + text for text in given],
        dimensions=body.output_dimension,
        priority=body.priority,
        **_cut_of(body, model.max_model_len),
    )
    with in_words_of(_WORDS):
        work = await prepare_embeddings(asked, model)
    return CohereWork(work, given, kinds)


# what a client called the fields of the request that its own became
_WORDS = {"input": "texts", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}


def _texts_of(body: CohereEmbedRequest) -> list[str]:
    if bool(body.texts) == bool(body.inputs):
        raise invalid("texts: give texts or inputs, one of them, and at least one text.", "texts")
    inputs = body.inputs or []
    num_texts = len(body.texts or inputs)
    if num_texts > MAX_INPUTS:
        name = "inputs" if inputs else "texts"
        raise invalid(f"{name}: {num_texts} texts, at most {MAX_INPUTS} are allowed.", name)
    return body.texts or [_text_of(one, f"inputs[{number}]") for number, one in enumerate(inputs)]


def _text_of(given: Mapping[str, Any], where: str) -> str:
    content = given.get("content")
    if not isinstance(content, list) or not content:
        raise invalid(f'{where}.content: must be a list of parts: {{"type": "text", "text": TEXT}}.', where)
    lines = []
    for number, part in enumerate(content):
        place = f"{where}.content[{number}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise invalid(f"{place}: must be a part of the type text; vectors are of texts.", place)
        lines.append(text_in(part, "text", place))
    return "\n".join(lines)


def _prefix_of(input_type: str | None, model: ServedModel) -> str:
    """What the model's authors want before such a text."""
    if input_type is None:
        return ""
    prompts = own_prompts(model.engine.config.facts.path)
    names = _INPUT_TYPES.get(input_type, (input_type,))
    found = next((prompts[name] for name in names if name in prompts), None)
    if found is not None:
        return found
    if input_type in _INPUT_TYPES and not prompts:
        return ""
    known = ", ".join(sorted(prompts) or _INPUT_TYPES)
    raise invalid(f"Unsupported input_type {input_type[:40]!r}. This model knows {known}.", "input_type")


def _cut_of(body: CohereEmbedRequest, limit: int) -> dict[str, Any]:
    truncate = body.truncate or "END"
    if body.max_tokens is not None and body.max_tokens < 1:
        raise invalid(f"max_tokens={body.max_tokens}: must be at least 1.", "max_tokens")
    if truncate == _NEVER:
        if body.max_tokens is not None:
            raise invalid("max_tokens: not with truncate=NONE, by which no text is cut. Leave one out.", "max_tokens")
        return {}
    if truncate not in _SIDES:
        raise not_one_of("truncate", truncate, (*_SIDES, _NEVER))
    length = -1 if body.max_tokens is None else min(body.max_tokens, limit)
    return {"truncate_prompt_tokens": length, "truncation_side": _SIDES[truncate]}


class CohereWork:
    """Vectors on their way."""

    long_field = "embeddings"

    def __init__(self, work: EmbeddingWork, texts: list[str], kinds: list[str]) -> None:
        self._work = work
        self._texts = texts
        self._kinds = kinds

    async def whole(self) -> CohereEmbedAnswer:
        with in_words_of(_WORDS):
            outputs = await self._work.outputs()
        vectors = [output.outputs.vector for output in outputs]
        # made when they are written, one after the other
        lists: dict[str, Any] = {kind: map(_FORMS[kind], vectors) for kind in self._kinds}
        if FLOAT in lists:
            lists["floats"] = lists.pop(FLOAT)
        meta = CohereMeta(BilledUnits(self._work.usage.prompt_tokens))
        return CohereEmbedAnswer(new_id("embd"), CohereVectors(**lists), self._texts, meta)


ENDPOINT = Endpoint(CohereEmbedRequest, RULES, _answer, lambda work: work.whole())
