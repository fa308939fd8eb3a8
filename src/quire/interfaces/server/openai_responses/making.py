"""From a request to a response: the conversation it stands in, the chat that it is, and where it is kept."""

from __future__ import annotations

import time
from typing import Any

from starlette.datastructures import State

from quire.errors import ContextLengthError
from quire.interfaces.server.access.caller import current_caller
from quire.interfaces.server.openai.chat import prepare_chat
from quire.interfaces.server.openai.work import Work
from quire.interfaces.server.openai_responses.answer import ResponseAnswer
from quire.interfaces.server.openai_responses.fields import NAMES, ResponsesRequest, chat_of, check
from quire.interfaces.server.openai_responses.items import item_id, items_of, messages_of, turns_of
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.services import NothingIsKept, ResponseStore
from quire.interfaces.server.wire.errors import in_words_of


async def prepare(body: ResponsesRequest, state: State) -> ResponseAnswer:
    """Checked and not begun. Raises for what is wrong, before a first byte is sent."""
    model: ServedModel = await state.models.named(body.model)
    check(body)
    items = items_of(body.input, sees_images=model.renderer.sees_images)
    store: ResponseStore = NothingIsKept()
    if body.store is not False or body.previous_response_id:
        store = await state.services.responses_of(current_caller().name)
    past = await store.conversation(body.previous_response_id) if body.previous_response_id else []
    if body.store is False:
        store = NothingIsKept()
    messages = messages_of(body.instructions, [*past, *items])
    with in_words_of(NAMES):
        work = await _fitting_work(body, messages, model)
    return ResponseAnswer(
        _head(body, work, is_kept=store.keeps),
        work,
        items,
        store,
        num_top=work.num_top(body.top_logprobs) or 0,
        is_padded=bool(body.stream_options and body.stream_options.include_obfuscation),
        is_background=bool(body.background),
        shows_messages=bool(body.enable_response_messages),
    )


async def _fitting_work(body: ResponsesRequest, messages: list[dict[str, Any]], model: ServedModel) -> Work:
    """With truncation=auto: without as many of the oldest turns as it takes, found by halving."""
    try:
        return await _work_of(body, messages, model)
    except ContextLengthError:
        cuts = turns_of(messages) if body.truncation == "auto" else []
        if not cuts:
            raise
    first = 1 if messages[0]["role"] in ("system", "developer") else 0
    shortest = await _work_of(body, messages[:first] + messages[cuts[-1] :], model)
    fits = (len(cuts) - 1, shortest)
    too_long = -1
    while fits[0] - too_long > 1:
        middle = (fits[0] + too_long) // 2
        try:
            work = await _work_of(body, messages[:first] + messages[cuts[middle] :], model)
            fits = middle, work
        except ContextLengthError:
            too_long = middle
    return fits[1]


async def _work_of(body: ResponsesRequest, messages: list[dict[str, Any]], model: ServedModel) -> Work:
    return await prepare_chat(chat_of(body, messages), model, conversation="input")


def _head(body: ResponsesRequest, work: Work, *, is_kept: bool) -> dict[str, Any]:
    """Fields that are known before the first token. OpenAI's client wants those that say nothing, too."""
    text = body.text
    reasoning = body.reasoning or {}
    return {
        "id": item_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": body.model or work.model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": is_kept,
        "temperature": work.params.temperature,
        "text": {
            "format": (text.format if text else None) or {"type": "text"},
            "verbosity": text.verbosity if text else None,
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_shown(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": float(getattr(work.params, "top_p", 1.0)),
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    empty = {"description": None, "parameters": None, "strict": None}
    return {**empty, **tool}
