"""The endpoints of Ollama's API."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType
from starlette.datastructures import State

from quire.interfaces.server.access.in_flight import until_disconnect
from quire.interfaces.server.endpoint import Endpoint, respond
from quire.interfaces.server.ollama.answer import LINES, OllamaAnswer, in_a_chat, in_a_text, now_text
from quire.interfaces.server.ollama.fields import (
    CHAT_RULES,
    GENERATE_RULES,
    NAMES,
    OllamaChatRequest,
    OllamaGenerateRequest,
    asks_for_nothing,
    chat_of,
    check_options,
    completion_of,
    seconds_of,
)
from quire.interfaces.server.ollama.models import Running, ShownModel, Tags, model_named, running, shown, tags
from quire.interfaces.server.openai.chat import prepare_chat_that_fits
from quire.interfaces.server.openai.completions import prepare_text
from quire.interfaces.server.openai.embeddings import EmbeddingRequest, prepare_embeddings
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.rendering import around_a_hole
from quire.interfaces.server.openai.work import Work
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.served_model import Models
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import ApiError, in_words_of, invalid
from quire.interfaces.server.wire.field_rules import Refused
from quire.interfaces.server.wire.json_answer import json_answer
from quire.version import __version__

router = APIRouter()
_LINE_WORDS = "lines of JSON, the last one says `done`; after a failure it holds an `error`"


class OllamaFailure(msgspec.Struct):
    """The body of every error of this API."""

    error: str


class OllamaMessage(msgspec.Struct):
    """What the assistant says."""

    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class OllamaLine(msgspec.Struct, kw_only=True):
    """A line of an answer, or all of it. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class OllamaChatLine(OllamaLine, kw_only=True):
    """Of /api/chat."""

    message: OllamaMessage


class OllamaTextLine(OllamaLine, kw_only=True):
    """Of /api/generate."""

    response: str
    thinking: str | UnsetType = UNSET


def _lines(request: type[msgspec.Struct], answer: type[OllamaLine]) -> dict[str, Any]:
    return described(
        request=request,
        answer=answer,
        event=answer,
        event_words=_LINE_WORDS,
        event_media_type=LINES,
        error=OllamaFailure,
    )


# ---- what is generated -----------------------------------------------------------------------------------------------


@router.post("/api/chat", openapi_extra=_lines(OllamaChatRequest, OllamaChatLine))
async def ollama_chat(request: Request) -> Response:
    """Answers a chat, line by line unless stream is false."""
    body = await read_request(request, OllamaChatRequest, CHAT_RULES)
    return await _respond(request, body, CHAT)


@router.post("/api/generate", openapi_extra=_lines(OllamaGenerateRequest, OllamaTextLine))
async def ollama_generate(request: Request) -> Response:
    """Answers a prompt, or continues it, line by line unless stream is false."""
    body = await read_request(request, OllamaGenerateRequest, GENERATE_RULES)
    return await _respond(request, body, GENERATE)


async def _respond(
    request: Request, body: OllamaChatRequest | OllamaGenerateRequest, endpoint: Endpoint[Any]
) -> Response:
    if asks_for_nothing(body):
        with in_words_of(NAMES):
            check_options(body)
        await _load_or_leave(request.app.state.models, body)
        said = {"message": {"role": "assistant", "content": ""}} if endpoint is CHAT else {"response": ""}
        reason = "unload" if seconds_of(body.keep_alive) == 0 else "load"
        answer = {"model": body.model, "created_at": now_text(), **said, "done": True, "done_reason": reason}
        return json_answer(answer)
    return await respond(request, await endpoint.answer(body, request.app.state), is_stream=bool(body.stream))


async def _load_or_leave(models: Models, body: OllamaChatRequest | OllamaGenerateRequest) -> None:
    name = models.further.find(body.model.removesuffix(":latest"))
    if name is None or seconds_of(body.keep_alive) != 0:
        await model_named(models, body.model)
    _keep(models, body.model, body.keep_alive)


def _keep(models: Models, model: str, keep_alive: float | str | None) -> None:
    """For as long as the client wants; the model that a server was started with always stays."""
    seconds = seconds_of(keep_alive)
    name = models.further.find(model.removesuffix(":latest"))
    if seconds is not None and name is not None:
        models.further.keep(name, seconds)


async def _chat(body: OllamaChatRequest, state: State) -> OllamaAnswer:
    model = await model_named(state.models, body.model)
    _keep(state.models, body.model, body.keep_alive)
    with in_words_of(NAMES):
        work = await prepare_chat_that_fits(chat_of(body), model)
    return _answer(body, work, in_a_chat)


async def _generate(body: OllamaGenerateRequest, state: State) -> OllamaAnswer:
    model = await model_named(state.models, body.model)
    _keep(state.models, body.model, body.keep_alive)
    with in_words_of(NAMES):
        if body.suffix:
            text = around_a_hole(model.renderer, body.prompt, body.suffix)
        elif body.raw or not model.renderer.has_chat_template:
            text = body.prompt
        else:
            with in_words_of({"messages": "prompt"}):
                return _answer(
                    body, await prepare_chat_that_fits(chat_of(body), model, conversation="prompt"), in_a_text
                )
        return _answer(body, await prepare_text(completion_of(body, text), model), in_a_text)


def _answer(body: OllamaChatRequest | OllamaGenerateRequest, work: Work, form: Any) -> OllamaAnswer:
    num_top = work.num_top(body.top_logprobs or 0) if body.logprobs else None
    return OllamaAnswer(body.model, work, form, num_top)


CHAT = Endpoint(OllamaChatRequest, CHAT_RULES, _chat)
GENERATE = Endpoint(OllamaGenerateRequest, GENERATE_RULES, _generate)


# ---- vectors ---------------------------------------------------------------------------------------------------------


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """POST /api/embed."""

    model: Annotated[str, Meta(description="name of the served model")]
    input: Annotated[str | list[str], Meta(description="a text, or texts; at most 2,048")]
    dimensions: Annotated[int | None, Meta(description="so many of the first numbers")] = None
    keep_alive: Annotated[float | str | None, Meta(description="as in /api/chat")] = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """POST /api/embeddings, the older one."""

    model: str
    prompt: str
    keep_alive: Annotated[float | str | None, Meta(description="as in /api/chat")] = None


class OllamaVectors(msgspec.Struct, kw_only=True):
    """The answer of /api/embed."""

    model: str
    embeddings: list[list[float] | msgspec.Raw]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(msgspec.Struct):
    """The answer of /api/embeddings."""

    embedding: list[float] | msgspec.Raw


_NEVER_CUT = {"truncate": Refused("inputs are never cut; shorten the input", (False,))}
_NO_OPTIONS = {"options": "none of them changes a vector"}
_EMBED_RULES = rules_for(OllamaEmbedRequest, _NEVER_CUT, ignored=_NO_OPTIONS)
_EMBEDDINGS_RULES = rules_for(OllamaEmbeddingsRequest, _NEVER_CUT, ignored=_NO_OPTIONS)


@router.post(
    "/api/embed", openapi_extra=described(request=OllamaEmbedRequest, answer=OllamaVectors, error=OllamaFailure)
)
async def ollama_embed(request: Request) -> Response:
    """Vectors of texts."""
    body = await read_request(request, OllamaEmbedRequest, _EMBED_RULES)
    began = time.perf_counter_ns()
    vectors, num_tokens = await _vectors(request, body, body.input, body.dimensions)
    seconds = time.perf_counter_ns() - began
    answer = OllamaVectors(
        model=body.model, embeddings=vectors, total_duration=seconds, load_duration=0, prompt_eval_count=num_tokens
    )
    return json_answer(answer)


@router.post(
    "/api/embeddings",
    openapi_extra=described(request=OllamaEmbeddingsRequest, answer=OllamaVector, error=OllamaFailure),
)
async def ollama_embeddings(request: Request) -> Response:
    """The vector of one text; clients of today use /api/embed."""
    body = await read_request(request, OllamaEmbeddingsRequest, _EMBEDDINGS_RULES)
    with in_words_of({"input": "prompt"}):
        vectors, _ = await _vectors(request, body, body.prompt, None)
    return json_answer(OllamaVector(vectors[0] if vectors else []))


async def _vectors(
    request: Request,
    body: OllamaEmbedRequest | OllamaEmbeddingsRequest,
    texts: str | list[str],
    dimensions: int | None,
) -> tuple[list[Any], int]:
    state = request.app.state
    model = await model_named(state.models, body.model)
    _keep(state.models, body.model, body.keep_alive)
    if not texts:
        return [], 0
    work = await prepare_embeddings(EmbeddingRequest(input=texts, dimensions=dimensions), model)
    found = await until_disconnect(state.in_flight, request.receive, work.whole())
    return [one.embedding for one in found.data], found.usage.prompt_tokens


# ---- models ----------------------------------------------------------------------------------------------------------


class OllamaVersion(msgspec.Struct):
    """GET /api/version."""

    version: str


class ShowRequest(msgspec.Struct, kw_only=True):
    """POST /api/show; `name` is the older word."""

    model: str | None = None
    name: str | None = None


_SHOW_RULES = rules_for(ShowRequest, ignored={"verbose": "the answer is the same, vocabularies are too long for it"})


class PullRequest(ShowRequest, kw_only=True):
    """POST /api/pull."""


class Progress(msgspec.Struct):
    """How far a model has come."""

    status: str


_PULL_RULES = rules_for(
    PullRequest, ignored={"stream": "the answer is one line either way", "insecure": "nothing is fetched"}
)


@router.get("/api/version", openapi_extra=described(answer=OllamaVersion, error=OllamaFailure))
async def ollama_version() -> Response:
    """The version of this server."""
    return json_answer(OllamaVersion(__version__))


@router.get("/api/tags", openapi_extra=described(answer=Tags, error=OllamaFailure))
async def ollama_tags(request: Request) -> Response:
    """The models that can be asked for."""
    return json_answer(tags(request.app.state.models))


@router.get("/api/ps", openapi_extra=described(answer=Running, error=OllamaFailure))
async def ollama_ps(request: Request) -> Response:
    """The models that are in memory."""
    return json_answer(running(request.app.state.models))


@router.post("/api/show", openapi_extra=described(request=ShowRequest, answer=ShownModel, error=OllamaFailure))
async def ollama_show(request: Request) -> Response:
    """What is known of a model."""
    body = await read_request(request, ShowRequest, _SHOW_RULES)
    models = request.app.state.models
    return json_answer(await shown(models, _name_in(body)))


@router.post("/api/pull", openapi_extra=described(request=PullRequest, answer=Progress, error=OllamaFailure))
async def ollama_pull(request: Request) -> Response:
    """Of a model that is served: it is here. Others are fetched by whoever runs the server."""
    body = await read_request(request, PullRequest, _PULL_RULES)
    name = _name_in(body)
    models = request.app.state.models
    if models.further.find(name) is not None:
        return json_answer(Progress("success"))
    try:
        await model_named(models, name)
    except ApiError as error:
        if error.status != 404:
            raise
        text = f"The server fetches no models. Whoever runs it does: quire pull {name[:200]}, then quire serve."
        raise ApiError(403, text, type="permission_error", param="model") from None
    return json_answer(Progress("success"))


def _name_in(body: ShowRequest) -> str:
    name = body.model or body.name
    if not name:
        raise invalid("model: this field is required.", "model")
    return name
