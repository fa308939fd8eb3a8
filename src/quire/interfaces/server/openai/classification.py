"""POST /v1/classify and POST /pooling (vLLM's): what a head of labels says of texts, and numbers whatever they are."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta
from starlette.datastructures import State

from quire.errors import RequestError
from quire.interfaces.class_labels import CLASSIFY, ClassLabels, checked_task
from quire.interfaces.server.endpoint import Endpoint
from quire.interfaces.server.openai.embeddings import BASE64, FLOAT, encoded
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.pooling_work import (
    MAX_INPUTS,
    ListOf,
    PoolingAnswer,
    PoolingWork,
    ScoringFields,
    answer_of,
    entries_of,
    inputs_of,
)
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import in_words_of, invalid_at_vllm, not_one_of
from quire.interfaces.server.wire.field_rules import Refused
from quire.interfaces.server.wire.prompt_forms import names_of, split_prompts
from quire.outputs import EmbeddingRequestOutput
from quire.pooling_params import PoolingParams

router = APIRouter()
# of vLLM's tasks, the one that code of others has
_PLUGIN = "plugin"


class ClassifyRequest(ScoringFields, kw_only=True):
    """Texts to classify."""

    input: Annotated[
        str | list[Any],
        Meta(description="text, list of texts, list of token ids, or list of such lists; at most 2,048"),
    ]
    add_special_tokens: Annotated[
        bool | None, Meta(description="vLLM's: false leaves out what the tokenizer adds to a text")
    ] = None


class PoolingRequest(ClassifyRequest, kw_only=True):
    """Texts to make numbers of."""

    task: Annotated[str | None, Meta(description="embed or classify; by default what the model is for")] = None
    encoding_format: Annotated[str | None, Meta(description="float (default), or base64 as in /v1/embeddings")] = None
    dimensions: Annotated[int | None, Meta(description="so many of the first numbers of a vector")] = None
    normalize: Annotated[bool | None, Meta(description="false leaves a vector's length as it is")] = None


REFUSED = {
    "messages": Refused("input is a text or its tokens; /tokenize makes the tokens of a chat"),
    "truncate_prompt_tokens": Refused("inputs are never cut; shorten the input"),
    "embed_dtype": Refused("numbers are float32", ("float32",)),
    "endianness": Refused("base64 holds little-endian numbers", ("little", "native")),
}
CLASSIFY_RULES = rules_for(ClassifyRequest, REFUSED)
POOLING_RULES = rules_for(PoolingRequest, REFUSED)


class Classified(msgspec.Struct):
    """One text: its most probable label, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(ListOf[Classified]):
    """The answer of /v1/classify."""


class Numbers(msgspec.Struct):
    """Of one text."""

    index: int
    data: list[float] | str | msgspec.Raw
    object: str = "pooling"


class PoolingList(ListOf[Numbers]):
    """The answer of /pooling."""


_CLASSIFY = described(request=ClassifyRequest, answer=ClassificationList)


@router.post("/classify", name="classify_without_version", openapi_extra=_CLASSIFY)
@router.post("/v1/classify", openapi_extra=_CLASSIFY)
async def classify(request: Request) -> Response:
    """Labels of texts."""
    return await CLASSIFY_ENDPOINT.respond(request)


@router.post("/pooling", openapi_extra=described(request=PoolingRequest, answer=PoolingList))
async def pool(request: Request) -> Response:
    """Numbers of texts: vectors, or what a head of labels says."""
    return await POOLING_ENDPOINT.respond(request)


async def _work(body: ClassifyRequest, model: ServedModel, task: str, params: PoolingParams) -> PoolingWork:
    model.engine.class_labels.check(task)
    asked = split_prompts(body.input, "input", MAX_INPUTS)
    with in_words_of({"prompt": "input"}):
        inputs = await inputs_of(model, asked, names_of(body.input, asked, "input"), body.add_special_tokens)
    return PoolingWork(inputs, params, task, model, body)


async def _classify(body: ClassifyRequest, state: State) -> PoolingAnswer:
    model: ServedModel = await state.models.named(body.model)
    work = await _work(body, model, CLASSIFY, PoolingParams(use_activation=body.use_activation))
    labels = model.engine.class_labels.names

    def classified(index: int, output: EmbeddingRequestOutput) -> Classified:
        vector = output.outputs.vector
        return Classified(index, labels[int(vector.argmax())], vector.tolist(), len(vector))

    name = body.model or model.name
    return answer_of(ClassificationList, "classify", name, work.usage, lambda: entries_of(work, classified))


async def _pool(body: PoolingRequest, state: State) -> PoolingAnswer:
    model: ServedModel = await state.models.named(body.model)
    if body.encoding_format not in (None, FLOAT, BASE64):
        raise not_one_of("encoding_format", body.encoding_format, (FLOAT, BASE64))
    task = _task_of(body.task, model.engine.class_labels)
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize, use_activation=body.use_activation)
    work = await _work(body, model, task, params)

    def numbers(index: int, output: EmbeddingRequestOutput) -> Numbers:
        return Numbers(index, encoded(output, is_base64=body.encoding_format == BASE64))

    name = body.model or model.name
    return answer_of(PoolingList, "pool", name, work.usage, lambda: entries_of(work, numbers))


def _task_of(asked: str | None, labels: ClassLabels) -> str:
    if asked == _PLUGIN:
        raise invalid_at_vllm("No IOProcessor plugin installed. Give the task embed or classify.", "task")
    try:
        task = checked_task(asked, labels)
        labels.check(task)
    except RequestError as error:
        if asked is None:
            raise
        raise invalid_at_vllm(f"Unsupported task: {asked[:40]!r}. {error}", "task") from None
    return task


CLASSIFY_ENDPOINT = Endpoint(ClassifyRequest, CLASSIFY_RULES, _classify, PoolingAnswer.whole)
POOLING_ENDPOINT = Endpoint(PoolingRequest, POOLING_RULES, _pool, PoolingAnswer.whole)
