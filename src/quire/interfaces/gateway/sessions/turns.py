"""Turns of sessions: POST /v1/sessions/{id}/messages and /v1/sessions/{id}/completions.

A turn is an ordinary chat or completion, whole or as a stream, whose prompt is the whole conversation; what the engine
keeps of it is not computed again. So the answers have the form, and the texts, of /v1/chat/completions and
/v1/completions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from quire.interfaces.assembly import OutputDelta
from quire.interfaces.gateway.sessions.endpoints import PATH, sessions_of
from quire.interfaces.gateway.sessions.kept_session import KeptSession, Kind, TurnEngine
from quire.interfaces.gateway.sessions.requests import CHAT_RULES, TEXT_RULES
from quire.interfaces.server.access.caller import tenant_of
from quire.interfaces.server.endpoint import respond
from quire.interfaces.server.openai.chat import prepare_chat
from quire.interfaces.server.openai.chat_answer import ChatAnswer
from quire.interfaces.server.openai.chunks import ChatChunk, CompletionChunk
from quire.interfaces.server.openai.continuations import Continuations
from quire.interfaces.server.openai.rendering import render
from quire.interfaces.server.openai.requests import ChatRequest, CompletionRequest
from quire.interfaces.server.openai.responses import ChatCompletion, ChatMessage, Completion
from quire.interfaces.server.openai.sampling import check_length, check_stream_options, completion_params
from quire.interfaces.server.openai.work import Work
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.prompt_forms import check_token_ids
from quire.renderer import RenderedPrompt

router = APIRouter()


@router.post(
    PATH + "/{session_id}/messages",
    openapi_extra=described(request=ChatRequest, answer=ChatCompletion, event=ChatChunk, errors=(409, 429)),
)
async def continue_chat(request: Request, session_id: str) -> Response:
    """Answers new messages of a chat; `messages` holds these alone."""
    body = await read_request(request, ChatRequest, CHAT_RULES)
    kept = _session_for(request, session_id, Kind.CHAT)
    if not body.messages:
        raise invalid("messages: a turn brings at least one message.", "messages")
    body.messages = [*kept.messages, *body.messages]
    model = await _model_of(kept, body.model, request)
    answer = ChatAnswer(body, await prepare_chat(body, model))

    def keep() -> None:
        said = [*body.messages, _as_sent_back(answer.message())]
        kept.turn_ended(said, Kind.CHAT, sessions_of(request).now)

    return await respond(request, _Turn(answer, body.n, keep), is_stream=bool(body.stream))


@router.post(
    PATH + "/{session_id}/completions",
    openapi_extra=described(request=CompletionRequest, answer=Completion, event=CompletionChunk, errors=(409, 429)),
)
async def continue_text(request: Request, session_id: str) -> Response:
    """Continues a text; `prompt` is appended to it, and may be empty after the first turn."""
    body = await read_request(request, CompletionRequest, TEXT_RULES)
    kept = _session_for(request, session_id, Kind.TEXT)
    check_stream_options(body)
    model = await _model_of(kept, body.model, request)
    whole = kept.engine_session.token_ids
    whole += await _tokens_of(body, model, is_first=not whole)
    if not whole:
        raise invalid("prompt: holds no tokens. The first turn of a session has at least one.", "prompt")
    check_length(len(whole), "max_tokens", body.max_tokens, model.max_model_len, what="prompt")
    params = completion_params(body, model.defaults)
    work = await Work.prepare(model, [RenderedPrompt(whole)], params, body)

    def keep() -> None:
        kept.turn_ended([], Kind.TEXT, sessions_of(request).now)

    turn = _Turn(Continuations(body, work, [""]), body.n, keep)
    return await respond(request, turn, is_stream=bool(body.stream))


class _Turn:
    """An answer that is kept before its last part is handed out, the first choice of several. A turn that is left
    before, or fails, changes nothing of what was said."""

    def __init__(self, answer: ChatAnswer | Continuations, num_choices: int | None, keep: Callable[[], None]) -> None:
        self._answer = answer
        self._num_open = num_choices or 1
        self._keep = keep
        self.dialect = answer.dialect
        self.long_field = answer.long_field
        self.generating = answer.generating
        self.end = answer.end
        self.whole = answer.whole

    def encode(self, delta: OutputDelta) -> bytes:
        self.fold(delta)
        return self._answer.encode(delta)

    def fold(self, delta: OutputDelta) -> None:
        self._answer.fold(delta)
        if delta.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open:
                self._keep()


async def _model_of(kept: KeptSession, name: str | None, request: Request) -> ServedModel:
    """The one that a turn names, as it sees it."""
    model: ServedModel = await request.app.state.models.named(name)
    engine: Any = TurnEngine(model.engine, kept)
    return replace(model, engine=engine)


def _session_for(request: Request, session_id: str, kind: Kind) -> KeptSession:
    """The session, if it can take a turn of this kind now."""
    sessions = sessions_of(request)
    kept = sessions.find(session_id, tenant_of())
    kept.check_kind(kind)
    kept.check_free()
    sessions.check_room(kept.tenant)
    return kept


def _as_sent_back(message: ChatMessage) -> dict[str, Any]:
    """The answer as a client would send it in the next request. Thoughts are not part of a conversation."""
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        sent["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    return sent


async def _tokens_of(body: CompletionRequest, model: ServedModel, *, is_first: bool) -> list[int]:
    """What is new. In the middle of a text no special tokens are put around it."""
    prompt = body.prompt
    limit = model.max_model_len
    if prompt is None:
        raise invalid("prompt: is missing. A turn has one: a text or a list of token ids.", "prompt")
    if isinstance(prompt, list):
        if not all(type(token) is int for token in prompt):
            raise invalid("prompt: a turn of a session has one prompt, a text or a list of token ids.", "prompt")
        check_token_ids(prompt, model.engine.config.facts.vocab_size, "prompt")
        return prompt
    if is_first:
        return (await render(model, prompt, add_special_tokens=body.add_special_tokens)).token_ids
    return await model.text_threads.call(model.renderer.render_continuation, prompt, max_tokens=limit)
