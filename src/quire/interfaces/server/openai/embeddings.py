"""POST /v1/embeddings: the vectors of texts, in the order of the texts."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta
from starlette.datastructures import State

from quire.interfaces.class_labels import EMBED
from quire.interfaces.server.access.caller import new_id
from quire.interfaces.server.access.in_flight import until_disconnect
from quire.interfaces.server.endpoint import Endpoint, respond
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.pooling_work import (
    MAX_INPUTS,
    PoolingUsage,
    PoolingWork,
    entries_of,
    inputs_of,
    padded,
)
from quire.interfaces.server.openai.rendering import RIGHT, Cut, render
from quire.interfaces.server.openai.vector_bytes import LITTLE, as_bytes, check_format
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import in_words_of, invalid, not_one_of
from quire.interfaces.server.wire.prompt_forms import names_of, split_prompts
from quire.outputs import EmbeddingRequestOutput
from quire.pooling_params import PoolingParams

FLOAT = "float"
BASE64 = "base64"
# the whole body is the numbers of all vectors, and a header says where each one is, or not
BYTES = "bytes"
BYTES_ONLY = "bytes_only"
_ENCODINGS = (FLOAT, BASE64, BYTES, BYTES_ONLY)
MAX_LENGTH = "max_length"
_PADDINGS = (MAX_LENGTH, "do_not_pad")
_BINARY = "application/octet-stream"
# vectors whose places one header holds: clients take 64 KiB
_MOST_DESCRIBED = 512

router = APIRouter()


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """A request for vectors."""

    input: Annotated[
        str | list[Any] | None,
        Meta(description="text, list of texts, list of token ids, or list of such lists; at most 2,048"),
    ] = None
    messages: Annotated[
        list[dict[str, Any]] | None, Meta(description="vLLM's: a chat in place of input, as its template writes it")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="of messages: true ends them with the assistant's opening")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="of messages: true leaves the end of the last one open")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="of messages: values that the chat template can see")
    ] = None
    model: Annotated[str | None, Meta(description="name of the served model; may be left out")] = None
    encoding_format: Annotated[
        str | None,
        Meta(description="float (default), base64, or vLLM's bytes and bytes_only: the numbers are the whole body"),
    ] = None
    embed_dtype: Annotated[
        str | None, Meta(description="vLLM's: float32 (default), float16, bfloat16 or fp8 ones, of base64 and bytes")
    ] = None
    endianness: Annotated[str | None, Meta(description="vLLM's: little (default), native or big, of the same")] = None
    dimensions: Annotated[
        int | None, Meta(description="so many of the first numbers; for models that were trained for it")
    ] = None
    normalize: Annotated[bool | None, Meta(description="vLLM's: false leaves a vector's length as it is")] = None
    use_activation: Annotated[bool | None, Meta(description="vLLM's newer name of normalize")] = None
    pooling: Annotated[
        str | None, Meta(description="Quire's: last, mean or cls, where it is not to be the model's own")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="vLLM's: false leaves out what the tokenizer adds to a text")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="vLLM's: so many tokens of each input count; -1: as many as the model takes")
    ] = None
    truncation_side: Annotated[
        str | None, Meta(description="vLLM's: right (default) or left: where an input that is too long is cut")
    ] = None
    padding: Annotated[
        str | None,
        Meta(description="vLLM's: max_length fills texts with padding tokens up to the model's length, which see each "
             "other and are seen; do_not_pad (default)"),
    ] = None  # fmt: skip
    priority: Annotated[int | None, Meta(description="vLLM's: lower is served first, with the policy priority")] = None
    cache_salt: Annotated[str | None, Meta(description="vLLM's: only requests of the same salt share a cache")] = None


RULES = rules_for(EmbeddingRequest)


class Embedding(msgspec.Struct):
    """One vector."""

    index: int
    embedding: list[float] | str | msgspec.Raw
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """The answer."""

    data: list[Embedding]
    model: str
    usage: PoolingUsage
    id: str
    created: int
    object: str = "list"


@router.post("/v1/embeddings", openapi_extra=described(request=EmbeddingRequest, answer=EmbeddingList))
async def create_embeddings(request: Request) -> Response:
    """Vectors of texts."""
    body = await read_request(request, EmbeddingRequest, RULES)
    work = await _answer(body, request.app.state)
    if body.encoding_format not in (BYTES, BYTES_ONLY):
        return await respond(request, work, is_stream=False, fold=EmbeddingWork.whole)
    return await until_disconnect(request.app.state.in_flight, request.receive, work.binary())


async def _answer(body: EmbeddingRequest, state: State) -> EmbeddingWork:
    return await prepare_embeddings(body, await state.models.named(body.model))


async def prepare_embeddings(body: EmbeddingRequest, model: ServedModel) -> EmbeddingWork:
    """Checked, and not started. Other dialects come this way, too."""
    if body.encoding_format is not None and body.encoding_format not in _ENCODINGS:
        raise not_one_of("encoding_format", body.encoding_format, _ENCODINGS)
    check_format(body.embed_dtype, body.endianness)
    if body.padding is not None and body.padding not in _PADDINGS:
        raise not_one_of("padding", body.padding, _PADDINGS)
    params = PoolingParams(pooling=body.pooling, dimensions=body.dimensions, normalize=_normalizes(body))
    model.engine.class_labels.check(EMBED)
    asked, names = await _inputs_of(body, model)
    if body.encoding_format == BYTES and len(asked) > _MOST_DESCRIBED:
        text = f"{len(asked)} vectors, and a header says where at most {_MOST_DESCRIBED} are"
        raise invalid(f"encoding_format={BYTES}: {text}. Take {BYTES_ONLY}, or send fewer.", "encoding_format")
    limit = model.max_model_len
    cut = Cut.asked(body.truncate_prompt_tokens, body.truncation_side, limit, limit, default=RIGHT)
    with in_words_of({"prompt": "input"}):
        inputs = await inputs_of(model, asked, names, body.add_special_tokens, cut)
    if body.padding == MAX_LENGTH:
        inputs = padded(inputs, model)
    work = PoolingWork(inputs, params, EMBED, model, body)
    return EmbeddingWork(work, body, model)


ENDPOINT = Endpoint(EmbeddingRequest, RULES, _answer, lambda work: work.whole())


async def _inputs_of(body: EmbeddingRequest, model: ServedModel) -> tuple[list[str | list[int]], list[str]]:
    """Texts or tokens, and what errors call them: of a chat its tokens."""
    if body.messages is None:
        if body.input is None:
            raise invalid("input: this field is required, or messages.", "input")
        asked = split_prompts(body.input, "input", MAX_INPUTS)
        return asked, names_of(body.input, asked, "input")
    if body.input is not None:
        raise invalid("messages: not together with input. Give one of them.", "messages")
    if body.continue_final_message and body.add_generation_prompt:
        text = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise invalid(text, "continue_final_message")
    if model.renderer.media_sources(body.messages) or model.renderer.has_vectors(body.messages):
        # before they are fetched and read
        raise invalid("messages: vectors are of texts; leave images, videos and prompt_embeds out.", "messages")
    rendered = await render(
        model,
        body.messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=body.add_special_tokens,
        template_kwargs=body.chat_template_kwargs,
    )
    return [rendered.token_ids], ["messages"]


def _normalizes(body: EmbeddingRequest) -> bool | None:
    newer = body.use_activation
    older = body.normalize
    if newer is not None and older is not None and newer != older:
        values = f"normalize={str(older).lower()} and use_activation={str(newer).lower()}"
        raise invalid(f"{values}: they mean the same. Give one of them.", "use_activation")
    return older if newer is None else newer


class EmbeddingWork:
    """The vectors of one request on their way."""

    long_field = "data"

    def __init__(self, work: PoolingWork, body: EmbeddingRequest, model: ServedModel) -> None:
        self._work = work
        self._body = body
        self._model = model
        self._form = (body.embed_dtype, body.endianness)

    @property
    def usage(self) -> PoolingUsage:
        return self._work.usage

    async def outputs(self) -> list[EmbeddingRequestOutput]:
        with in_words_of({"prompt": "input"}):
            return await self._work.outputs()

    async def whole(self) -> EmbeddingList:
        if self._body.encoding_format in (BYTES, BYTES_ONLY):
            text = f"encoding_format={self._body.encoding_format}: only at /v1/embeddings, whose body it is."
            raise invalid(text, "encoding_format")
        is_base64 = self._body.encoding_format == BASE64

        def embedding(index: int, output: EmbeddingRequestOutput) -> Embedding:
            return Embedding(index, encoded(output, is_base64=is_base64, form=self._form))

        data = await entries_of(self._work, embedding)
        name = self._body.model or self._model.name
        return EmbeddingList(data, name, self.usage, id=new_id("embd"), created=int(time.time()))

    async def binary(self) -> Response:
        """The numbers of all vectors, one after the other."""
        outputs = await self.outputs()
        vectors = []
        for output in outputs:
            vectors.append(as_bytes(output.outputs.vector, *self._form))
            await asyncio.sleep(0)
        headers = {}
        if self._body.encoding_format == BYTES:
            headers["metadata"] = self._described(outputs, vectors)
        return Response(b"".join(vectors), media_type=_BINARY, headers=headers)

    def _described(self, outputs: list[EmbeddingRequestOutput], vectors: list[bytes]) -> str:
        """Where each vector is."""
        embed_dtype, endianness = self._form
        items = []
        start = 0
        for index, (output, vector) in enumerate(zip(outputs, vectors, strict=True)):
            form = {"embed_dtype": embed_dtype or "float32", "endianness": endianness or LITTLE}
            place = {"start": start, "end": start + len(vector), "shape": [len(output.outputs.vector)]}
            items.append({"index": index, **form, **place})
            start += len(vector)
        said = {"id": new_id("embd"), "created": int(time.time()), "model": self._body.model or self._model.name}
        # a header has no letters beyond ASCII, and a model's name may
        return json.dumps({**said, "data": items, "usage": msgspec.to_builtins(self.usage)})


def encoded(
    output: EmbeddingRequestOutput, *, is_base64: bool, form: tuple[str | None, str | None] = (None, None)
) -> msgspec.Raw:
    """As JSON already: all vectors of an answer at once would hold the event loop. `form`: embed_dtype and
    endianness."""
    if is_base64:
        text = base64.b64encode(as_bytes(output.outputs.vector, *form)).decode()
        return msgspec.Raw(msgspec.json.encode(text))
    return msgspec.Raw(msgspec.json.encode(output.outputs.embedding))
