"""POST /v1/embeddings: the vectors of texts, in the order of the texts."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta
from starlette.datastructures import State

from quire.errors import ContextLengthError
from quire.interfaces.server.access.caller import Caller, Reservation, current_caller
from quire.interfaces.server.access.in_flight import within_time
from quire.interfaces.server.endpoint import Endpoint
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.rendering import render
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import in_words_of, invalid
from quire.interfaces.server.wire.field_rules import Refused
from quire.interfaces.server.wire.prompt_forms import check_token_ids, names_of, split_prompts
from quire.observability.tracing import current_trace
from quire.outputs import EmbeddingRequestOutput
from quire.pooling_params import PoolingParams

# OpenAI's
MAX_INPUTS = 2048
_MOST_AT_ONCE = 64
FLOAT = "float"
BASE64 = "base64"

router = APIRouter()


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """A request for vectors."""

    input: Annotated[
        str | list[Any],
        Meta(description="text, list of texts, list of token ids, or list of such lists; at most 2,048"),
    ]
    model: Annotated[str | None, Meta(description="name of the served model; may be left out")] = None
    encoding_format: Annotated[
        str | None, Meta(description="float (default), or base64: the same numbers as float32 in base64")
    ] = None
    dimensions: Annotated[
        int | None, Meta(description="so many of the first numbers; for models that were trained for it")
    ] = None
    normalize: Annotated[bool | None, Meta(description="vLLM's: false leaves a vector's length as it is")] = None
    use_activation: Annotated[bool | None, Meta(description="vLLM's newer name of normalize")] = None
    pooling: Annotated[str | None, Meta(description="Quire's: last or mean, where it is not to be the model's own")] = (
        None
    )
    add_special_tokens: Annotated[
        bool | None, Meta(description="vLLM's: false leaves out what the tokenizer adds to a text")
    ] = None
    priority: Annotated[int | None, Meta(description="vLLM's: lower is served first, with the policy priority")] = None
    cache_salt: Annotated[str | None, Meta(description="vLLM's: only requests of the same salt share a cache")] = None


REFUSED = {
    "messages": Refused("input is a text or its tokens; /tokenize makes the tokens of a chat"),
    "truncate_prompt_tokens": Refused("inputs are never cut; shorten the input"),
    "embed_dtype": Refused("numbers are float32", ("float32",)),
    "endianness": Refused("base64 holds little-endian numbers", ("little", "native")),
}
RULES = rules_for(EmbeddingRequest, REFUSED)


class Embedding(msgspec.Struct):
    """One vector."""

    index: int
    embedding: list[float] | str | msgspec.Raw
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """OpenAI's `usage` of embeddings."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """The answer."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


@router.post("/v1/embeddings", openapi_extra=described(request=EmbeddingRequest, answer=EmbeddingList))
async def create_embeddings(request: Request) -> Response:
    """Vectors of texts."""
    return await ENDPOINT.respond(request)


async def _answer(body: EmbeddingRequest, state: State) -> _Work:
    model: ServedModel = await state.models.named(body.model)
    if body.encoding_format not in (None, FLOAT, BASE64):
        shown = str(body.encoding_format)[:40]
        raise invalid(f"encoding_format={shown!r}: must be {FLOAT} or {BASE64}.", "encoding_format")
    params = PoolingParams(pooling=body.pooling, dimensions=body.dimensions, normalize=_normalizes(body))
    asked = split_prompts(body.input, "input", MAX_INPUTS)
    caller = current_caller()
    names = names_of(body.input, asked, "input")
    priority = caller.priority(body.priority)
    with in_words_of({"prompt": "input"}):
        caller.admission.check(
            caller.tenant, _window(caller, len(asked)), sum(len(one) for one in asked if isinstance(one, list))
        )
        inputs: list[list[int]] = []
        for one, name in zip(asked, names, strict=True):
            inputs.append(await _tokens(model, one, name, body.add_special_tokens))
            # between many short texts others have their turn
            await asyncio.sleep(0)
    return _Work(inputs, names, params, body, caller, priority, model)


ENDPOINT = Endpoint(EmbeddingRequest, RULES, _answer, lambda work: work.whole())


def _normalizes(body: EmbeddingRequest) -> bool:
    newer = body.use_activation
    older = body.normalize
    if newer is not None and older is not None and newer != older:
        values = f"normalize={str(older).lower()} and use_activation={str(newer).lower()}"
        raise invalid(f"{values}: they mean the same. Give one of them.", "use_activation")
    return newer is not False and older is not False


async def _tokens(model: ServedModel, one: str | list[int], name: str, add_special_tokens: bool | None) -> list[int]:
    if isinstance(one, str):
        with in_words_of({"prompt": name}):
            one = (await render(model, one, add_special_tokens=add_special_tokens)).token_ids
        if not one:
            raise invalid(f"{name}: a text holds no tokens. Give at least one character.", name)
    else:
        check_token_ids(one, model.engine.config.facts.vocab_size, name)
    if len(one) > model.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, your {name} resulted in "
            f"{len(one)} tokens. Please reduce the length of the {name}.",
            param=name,
        )
    return one


def _window(caller: Caller, num_inputs: int) -> int:
    """How many inputs of one request are in the engine at a time: no request fills the queue alone."""
    most = caller.admission.max_sequences(caller.tenant)
    return max(1, min(num_inputs, _MOST_AT_ONCE, num_inputs if most is None else most))


class _Work:
    """The inputs of one request on their way."""

    long_field = "data"

    def __init__(
        self,
        inputs: list[list[int]],
        names: list[str],
        params: PoolingParams,
        body: EmbeddingRequest,
        caller: Caller,
        priority: int,
        model: ServedModel,
    ) -> None:
        self._body = body
        self._model = model
        self._inputs = inputs
        self._names = names
        self._params = params
        self._caller = caller
        self._asked: dict[str, Any] = {
            "priority": priority,
            "cache_salt": body.cache_salt or "",
            "tenant": caller.tenancy,
            "lora_request": model.adapter,
        }

    async def whole(self) -> EmbeddingList:
        with in_words_of({"prompt": "input"}):
            outputs = await self._outputs()
        num_tokens = sum(map(len, self._inputs))
        data = []
        for index, output in enumerate(outputs):
            data.append(Embedding(index, _encoded(output, is_base64=self._body.encoding_format == BASE64)))
            await asyncio.sleep(0)
        return EmbeddingList(data, self._body.model or self._model.name, EmbeddingUsage(num_tokens, num_tokens))

    async def _outputs(self) -> list[EmbeddingRequestOutput]:
        """In the order of the inputs. The first that fails ends the others."""
        trace = current_trace.get()
        if trace is not None:
            trace.describe({"gen_ai.request.model": self._model.name})
        caller = self._caller
        count = _window(self._caller, len(self._inputs))
        places = [(1, len(token_ids)) for token_ids in self._inputs[:count]]
        found: dict[int, EmbeddingRequestOutput] = {}
        with (
            closing(caller.admission.admit(caller.tenant, places)) as reservation,
            within_time(caller.admission, reservation),
        ):
            reservation.add_tokens(num_prompt=sum(map(len, self._inputs[count:])))
            left = iter(enumerate(self._inputs))
            tasks = [asyncio.ensure_future(self._take(left, found, reservation)) for _ in range(count)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return [found[number] for number in range(len(self._inputs))]

    async def _take(
        self,
        left: Iterator[tuple[int, list[int]]],
        found: dict[int, EmbeddingRequestOutput],
        reservation: Reservation,
    ) -> None:
        """One input after the other, as long as there are some."""
        for number, token_ids in left:
            found[number] = await self._output(number, token_ids, reservation)

    async def _output(self, number: int, token_ids: list[int], reservation: Reservation) -> EmbeddingRequestOutput:
        observer = self._model.metrics.observe_pooling(len(token_ids), time.monotonic())

        def started(num_cached_tokens: int) -> None:
            reservation.begin(number)
            reservation.add_tokens(num_cached=num_cached_tokens)
            observer.started(num_cached_tokens, time.monotonic())

        reason = "abort"
        try:
            with in_words_of({"prompt": self._names[number]}):
                output = await self._model.engine.embed(token_ids, self._params, on_start=started, **self._asked)
            reason = "stop"
            return output
        except Exception:
            reason = "error"
            raise
        finally:
            observer.finished(reason, time.monotonic())


def _encoded(output: EmbeddingRequestOutput, *, is_base64: bool) -> msgspec.Raw:
    """As JSON already: all vectors of an answer at once would hold the event loop."""
    if is_base64:
        text = base64.b64encode(output.outputs.vector.astype("<f4").tobytes()).decode()
        return msgspec.Raw(msgspec.json.encode(text))
    return msgspec.Raw(msgspec.json.encode(output.outputs.embedding))
