"""From a request to a response: the conversation it stands in, the chat that it is, and where it is kept."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import ContextLengthError
from quire.interfaces.server.openai.dialect import ChatRun
from quire.interfaces.server.openai_responses.answer import ResponseInTheMaking
from quire.interfaces.server.openai_responses.fields import NAMES, ResponsesRequest, chat_of, check
from quire.interfaces.server.openai_responses.items import Item, item_id, items_of, messages_of, turns_of
from quire.interfaces.server.services import NothingIsKept, ResponseStore
from quire.interfaces.server.state import ServerState
from quire.interfaces.server.wire.errors import ApiError, in_words_of


@dataclass(slots=True)
class Making:
    """One response that is checked and not begun."""

    answer: ResponseInTheMaking
    run: ChatRun
    # of its own input
    items: list[Item]
    # where it is kept
    stored: ResponseStore
    # its row is there already, and follows
    is_background: bool = False

    @classmethod
    async def prepare(cls, body: ResponsesRequest, state: ServerState, tenant: str) -> Making:
        """Raises for what is wrong, before a first byte is sent."""
        check(body)
        items = items_of(body.input, sees_images=state.engine.renderer.sees_images)
        store: ResponseStore = NothingIsKept()
        if body.store is not False or body.previous_response_id:
            store = await state.services.responses_of(tenant)
        past = await store.conversation(body.previous_response_id) if body.previous_response_id else []
        if body.store is False:
            store = NothingIsKept()
        messages = messages_of(body.instructions, [*past, *items])
        with in_words_of(NAMES):
            run = await _fitting_run(body, messages, state)
        is_padded = bool(body.stream_options and body.stream_options.include_obfuscation)
        head = _head(body, run, state, is_kept=store.keeps)
        answer = ResponseInTheMaking(head, run, is_padded=is_padded)
        return cls(answer, run, items, store, is_background=bool(body.background))

    @classmethod
    async def count_input(cls, body: ResponsesRequest, state: ServerState, tenant: str) -> int:
        """Tokens of the prompt that this request would have."""
        body = msgspec.structs.replace(body, store=False, background=None)

        async def prepared() -> ChatRun:
            return (await cls.prepare(body, state, tenant)).run

        return await ChatRun.count_input(prepared())

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.answer.response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Encoded. A failure is raised, and then told by `failed`."""
        answer = self.answer
        finish_reason = None
        has_begun = False
        async with aclosing(self.run.steps()) as steps:
            async for step in steps:
                # only now: a request that fails before is answered with its status
                events = b"" if has_begun else answer.begin()
                if self.is_background and not has_begun:
                    await self.stored.update(answer.response)
                has_begun = True
                finish_reason = step.finish_reason
                events += answer.step(step)
                if events:
                    yield events
        last = answer.finish(finish_reason, self.run.usage)
        if self.is_background:
            await self.stored.update(answer.response)
        else:
            # before its client can know that it is there
            await self.stored.add(answer.response, self.items)
        yield last + answer.ending()

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which has begun."""
        self.answer.fail(error)
        return self.answer.ending()


async def _fitting_run(body: ResponsesRequest, messages: list[dict[str, Any]], state: ServerState) -> ChatRun:
    """With truncation=auto: without as many of the oldest turns as it takes, found by halving."""
    try:
        return await _run_of(body, messages, state)
    except ContextLengthError:
        cuts = turns_of(messages) if body.truncation == "auto" else []
        if not cuts:
            raise
    first = 1 if messages[0]["role"] in ("system", "developer") else 0
    shortest = await _run_of(body, messages[:first] + messages[cuts[-1] :], state)
    fits = (len(cuts) - 1, shortest)
    too_long = -1
    while fits[0] - too_long > 1:
        middle = (fits[0] + too_long) // 2
        try:
            run = await _run_of(body, messages[:first] + messages[cuts[middle] :], state)
            fits = middle, run
        except ContextLengthError:
            too_long = middle
    return fits[1]


async def _run_of(body: ResponsesRequest, messages: list[dict[str, Any]], state: ServerState) -> ChatRun:
    return await ChatRun.prepare(chat_of(body, messages), state, conversation="input")


def _head(body: ResponsesRequest, run: ChatRun, state: ServerState, *, is_kept: bool) -> dict[str, Any]:
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
        "model": body.model or state.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": is_kept,
        "temperature": run.temperature,
        "text": {
            "format": (text.format if text else None) or {"type": "text"},
            "verbosity": text.verbosity if text else None,
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_shown(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": run.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    empty = {"description": None, "parameters": None, "strict": None}
    return {**empty, **tool}
