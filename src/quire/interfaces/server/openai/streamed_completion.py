"""Completions of prompts that arrive in pieces, and are computed meanwhile (streaming prefill, 4.4.4).

WebSocket /v1/completions/stream: parameters, pieces and the answer's chunks are messages.
POST /v1/completions, application/x-ndjson: parameters and pieces are lines of the body; the answer is as always.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request, Response, WebSocket, WebSocketDisconnect
from starlette.datastructures import State

from quire.engine_client import items_of
from quire.interfaces.server.access.in_flight import Ticket
from quire.interfaces.server.endpoint import respond
from quire.interfaces.server.event_stream import WRITE_DEADLINE_SECONDS
from quire.interfaces.server.openai.continuations import Continuations
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.prompt_pieces import Messages, bounded, lines_of, pieces_of, socket_messages
from quire.interfaces.server.openai.rendering import text_of
from quire.interfaces.server.openai.requests import StreamedCompletionRequest, StreamOptions
from quire.interfaces.server.openai.sampling import check_length, check_stream_options, completion_params
from quire.interfaces.server.openai.work import Work
from quire.interfaces.server.request_body import BodyChunks, check_encoding, read_text
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.errors import ApiError, ClientGoneError, api_error_of, invalid
from quire.interfaces.server.wire.field_rules import REFUSED_BY_BOTH, REFUSED_BY_COMPLETIONS, Refused

router = APIRouter()
SOCKET_PATH = "/v1/completions/stream"
_CUT = Refused("a prompt that arrives in pieces is computed before its end is known; send it whole")
_WHOLE = {
    "kv_transfer_params": Refused("a prompt that arrives in pieces has both halves in one server; send it whole"),
    "truncate_prompt_tokens": _CUT,
    "truncation_side": _CUT,
    "prompt_embeds": Refused("vectors come in one piece; send them to /v1/completions"),
    "suffix": msgspec.structs.replace(_CUT, neutral=("",)),
}
_RULES = rules_for(StreamedCompletionRequest, _WHOLE, REFUSED_BY_BOTH, REFUSED_BY_COMPLETIONS)
_LINES = re.compile(r'application/(x-)?ndjson\s*(;\s*charset="?utf-8"?\s*)?', re.IGNORECASE)
# RFC 6455: done, a message that breaks the rules, one that is too large, our own fault, try again later
_DONE = 1000
_REFUSED = 1008
_TOO_LARGE = 1009
_FAILED = 1011
_LATER = 1013
# for what is still on its way when the answer is known
_DISCARD_SECONDS = 1.0


# ---------------------------------------------------------------------------------------------- lines of a body


def is_in_lines(request: Request) -> bool:
    return bool(_LINES.fullmatch(request.headers.get("content-type", "").strip()))


async def answer_to_lines(request: Request) -> Response:
    """The body is read, and the prompt computed, until it ends; then the answer is that of any completion."""
    check_encoding(request)
    body_chunks = BodyChunks(request)
    try:
        with request.app.state.in_flight.enter():
            body, completion = await _received(lines_of(body_chunks), request.app.state)
    except ClientGoneError:
        request.scope["client_gone"] = True
        raise
    except Exception:
        await body_chunks.discard(_DISCARD_SECONDS)
        raise
    return await respond(request, completion, is_stream=bool(body.stream))


# ---------------------------------------------------------------------------------------------- WebSocket


@router.websocket(SOCKET_PATH)
async def stream_completion(socket: WebSocket) -> None:
    """One completion a socket, whose prompt arrives in pieces.

    The client sends texts: a CompletionRequest (its prompt may be left out, or be the first piece), then pieces
    {"text": string} or {"token_ids": [integer]}, and {"is_final": true} with the last one or after it. The server sends
    CompletionChunks, the last one with the usage, and closes with 1000. After an ErrorAnswer it closes with 1008
    (a mistake), 1009 (too large), 1011 (a failure) or 1013 (starting or stopping).
    """
    state: State = socket.app.state
    try:
        await socket.accept()
    except OSError:
        # the client has gone, or its handshake was refused because it could not be answered in time
        socket.scope["client_gone"] = True
        return
    try:
        with state.in_flight.enter() as ticket:
            await _converse(socket, state, ticket)
        await _leave(socket, None)
    except (ClientGoneError, WebSocketDisconnect):
        socket.scope["client_gone"] = True
    except Exception as error:
        await _leave(socket, api_error_of(error))


async def _converse(socket: WebSocket, state: State, ticket: Ticket) -> None:
    _, completion = await _received(socket_messages(socket), state, is_socket=True)
    watcher = asyncio.ensure_future(_watch(socket, ticket))
    try:
        async with completion.generating() as generation:
            async for delta in items_of(generation):
                await _send_all(socket, completion.encode(delta))
        await _send_all(socket, await completion.end())
    finally:
        watcher.cancel()
        # an interrupt that is on its way lands here, and not in what is still to be sent
        await asyncio.sleep(0)


async def _watch(socket: WebSocket, ticket: Ticket) -> None:
    """Notices a client that has gone, or goes on talking."""
    message = await socket.receive()
    is_gone = message["type"] == "websocket.disconnect"
    cause = ClientGoneError() if is_gone else invalid("The prompt was final: nothing may follow it.")
    ticket.interrupt(cause, "mistake")


async def _send_all(socket: WebSocket, chunks: bytes) -> None:
    for chunk in chunks.splitlines():
        await _send(socket, chunk)


async def _send(socket: WebSocket, chunk: bytes) -> None:
    try:
        async with asyncio.timeout(WRITE_DEADLINE_SECONDS):
            await socket.send_text(chunk.decode())
    except TimeoutError:
        # a client that takes nothing for so long is taken for gone
        raise ClientGoneError from None


async def _leave(socket: WebSocket, error: ApiError | None) -> None:
    code = _DONE if error is None else _close_code(error.status)
    try:
        if error is not None:
            await _send(socket, error.body())
        await socket.close(code)
    except (ClientGoneError, WebSocketDisconnect, RuntimeError):
        # RuntimeError: the client closed it in this moment
        socket.scope["client_gone"] = True


def _close_code(status: int) -> int:
    if status == 413:
        return _TOO_LARGE
    if status == 503:
        return _LATER
    return _REFUSED if status < 500 else _FAILED


# ---------------------------------------------------------------------------------------------- both


async def _received(
    messages: Messages, state: State, *, is_socket: bool = False
) -> tuple[StreamedCompletionRequest, Continuations]:
    """Parameters, and the prompt when it is whole. The request runs."""
    async with aclosing(messages), aclosing(bounded(messages, state.max_body_bytes)) as checked:
        # a server that ends does not wait for it, as it does not wait for a body
        with state.in_flight.enter(is_awaited=False):
            first = await anext(checked, None)
        if first is None:
            raise invalid("The body is empty. Its first line holds the parameters as a JSON object.")
        _check_no_piece(first)
        what = "message" if is_socket else "line"
        body = read_text(first, StreamedCompletionRequest, _RULES, strict=state.bodies.strict, what=what)
        if is_socket:
            _check_socket_fields(body)
        model: ServedModel = await state.models.named(body.model)
        check_stream_options(body)
        work = await Work.receive(
            model,
            pieces_of(checked, _first_piece(body), what),
            completion_params(body, model.defaults),
            body,
        )
        try:
            if not is_socket:
                await _check_end(checked)
            [prompt], [received] = work.prompts, work.prepared
            check_length(len(prompt), "max_tokens", body.max_tokens, model.max_model_len, what="prompt")
            text = await _text_of(received.prompt, prompt, body, model)
            ends = {"opening": b"", "closing": b"\n"} if is_socket else {}
            return body, Continuations(body, work, [text], **ends)
        except BaseException:
            await work.prepared[0].aclose()
            raise


class _FieldsOfPiece(msgspec.Struct):
    """Whether they are there; nothing else of the text is made into a value."""

    text: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    is_final: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _check_no_piece(first: bytes) -> None:
    """What belongs to a piece must not be taken for an unknown field and dropped."""
    try:
        fields = msgspec.json.decode(first, type=_FieldsOfPiece)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the check of the whole says it better
    for name in _FieldsOfPiece.__struct_fields__:
        if getattr(fields, name) is not msgspec.UNSET:
            raise invalid(
                f"{name}: the first message holds the parameters. Send {name} in a later one; "
                "a first piece may come with the parameters as `prompt`.",
                name,
            )


async def _check_end(messages: Messages) -> None:
    async for _ in messages:
        raise invalid("The prompt was final: no line may follow it.", "is_final")


def _check_socket_fields(body: StreamedCompletionRequest) -> None:
    """A socket always streams, and always ends with the usage."""
    if body.stream is False:
        raise invalid("stream: a WebSocket always streams. Leave it out, or send a POST.", "stream")
    if body.stream_options is not None and body.stream_options.include_usage is False:
        raise invalid("stream_options.include_usage: over a WebSocket the usage always comes.", "stream_options")
    body.stream = True
    body.stream_options = StreamOptions(include_usage=True)


def _first_piece(body: StreamedCompletionRequest) -> str | list[int] | None:
    prompt = body.prompt
    if prompt is None or isinstance(prompt, str):
        return prompt
    if all(type(token) is int for token in prompt):
        return prompt
    raise invalid("prompt: where pieces follow, it is the first of them: a text or a list of token ids.", "prompt")


async def _text_of(text: str | None, prompt: list[int], body: StreamedCompletionRequest, model: ServedModel) -> str:
    """What echo repeats."""
    if text is not None:
        return text
    if not body.echo:
        return ""
    return await text_of(model, prompt, skip_special_tokens=body.skip_special_tokens is not False)
