"""The endpoints of llama.cpp's own API. Its tokens and health are those of /tokenize, /detokenize and /health."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET, Meta, UnsetType
from starlette.datastructures import State

from quire.interfaces.server.access.caller import overseers_only
from quire.interfaces.server.endpoint import Endpoint
from quire.interfaces.server.llama_cpp.answer import LlamaCppAnswer
from quire.interfaces.server.llama_cpp.fields import (
    COMPLETION_RULES,
    INFILL_RULES,
    NAMES,
    CompletionOfLlamaCpp,
    InfillRequest,
    LlamaCppFields,
    before_the_hole,
    completion_of,
)
from quire.interfaces.server.openai.completions import prepare_text
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.rendering import render
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.served_model import Models, ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import in_words_of, invalid
from quire.interfaces.server.wire.json_answer import json_answer
from quire.renderer.fill_in_middle import middle_marks
from quire.version import __version__

router = APIRouter()


class LlamaCppCompletion(msgspec.Struct, kw_only=True):
    """An event, or the whole answer, which is what the last event is."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | list[int] | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Annotated[str | UnsetType, Meta(description="eos, limit or word")] = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET
    completion_probabilities: list[Any] | UnsetType = UNSET


_EVENTS = "events `data: JSON`, the last one says `stop`; after a failure it holds an ErrorAnswer"


@router.post(
    "/completion",
    openapi_extra=described(
        request=CompletionOfLlamaCpp, answer=LlamaCppCompletion, event=LlamaCppCompletion, event_words=_EVENTS
    ),
)
async def llama_cpp_completion(request: Request) -> Response:
    """Continues a prompt, in llama.cpp's form."""
    return await COMPLETION.respond(request)


@router.post(
    "/infill",
    openapi_extra=described(
        request=InfillRequest, answer=LlamaCppCompletion, event=LlamaCppCompletion, event_words=_EVENTS
    ),
)
async def llama_cpp_infill(request: Request) -> Response:
    """What stands between two texts, by a model that fills in the middle."""
    return await INFILL.respond(request)


async def _completion(body: CompletionOfLlamaCpp, state: State) -> LlamaCppAnswer:
    return await _answer(body, body.prompt, await state.models.named(body.model))


async def _infill(body: InfillRequest, state: State) -> LlamaCppAnswer:
    model: ServedModel = await state.models.named(body.model)
    marks = middle_marks(model.renderer)
    if marks is None:
        raise invalid(
            "input_suffix: this model knows no tokens for a hole. Serve one that fills in the middle.", "input_suffix"
        )
    text = marks.around(before_the_hole(body), body.input_suffix) + (body.prompt or "")
    return await _answer(body, text, model)


async def _answer(body: LlamaCppFields, prompt: str | list[int], model: ServedModel) -> LlamaCppAnswer:
    with in_words_of(NAMES):
        return LlamaCppAnswer(body, prompt, await prepare_text(completion_of(body, prompt), model))


COMPLETION = Endpoint(CompletionOfLlamaCpp, COMPLETION_RULES, _completion)
INFILL = Endpoint(InfillRequest, INFILL_RULES, _infill)


class Props(msgspec.Struct, kw_only=True):
    """GET /props."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    modalities: dict[str, bool]
    chat_template: Annotated[str, Meta(description="empty: this model takes no chats")]
    build_info: str


class Slot(msgspec.Struct, kw_only=True):
    """A row of the engine."""

    id: int
    n_ctx: int
    is_processing: bool


@router.get("/props", openapi_extra=described(answer=Props))
async def llama_cpp_props(request: Request) -> Response:
    """The model and its defaults, as llama.cpp's clients ask for them."""
    models: Models = request.app.state.models
    own = models.own
    props = Props(
        default_generation_settings={"n_ctx": own.max_model_len, "params": own.defaults},
        total_slots=own.engine.config.worker.max_num_seqs,
        model_alias=own.name,
        modalities={"vision": own.renderer.sees_images, "audio": False},
        chat_template=own.renderer.chat_template_text,
        build_info=f"quire {__version__}",
    )
    return json_answer(props)


@router.get("/slots", openapi_extra=described(answer=list[Slot], errors=(403,)), dependencies=[Depends(overseers_only)])
async def llama_cpp_slots(request: Request) -> Response:
    """As many as may run at once; the first ones are those that run. Requests are not bound to one."""
    models: Models = request.app.state.models
    own = models.own
    num_running = (await own.engine.control("observe_state"))["num_running"]
    slots = [
        Slot(id=number, n_ctx=own.max_model_len, is_processing=number < num_running)
        for number in range(own.engine.config.worker.max_num_seqs)
    ]
    return json_answer(slots)


class TemplateRequest(msgspec.Struct, kw_only=True):
    """POST /apply-template."""

    messages: Annotated[list[dict[str, Any]], Meta(description="as in /v1/chat/completions")]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Templated(msgspec.Struct):
    """A chat as a text."""

    prompt: str


TEMPLATE_RULES = rules_for(TemplateRequest)


@router.post("/apply-template", openapi_extra=described(request=TemplateRequest, answer=Templated))
async def llama_cpp_apply_template(request: Request) -> Response:
    """The text that the model would see of a chat."""
    body = await read_request(request, TemplateRequest, TEMPLATE_RULES)
    models: Models = request.app.state.models
    rendered = await render(models.own, body.messages, tools=body.tools, template_kwargs=body.chat_template_kwargs)
    return json_answer(Templated(rendered.text or ""))
