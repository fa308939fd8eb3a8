"""Prompts in pieces as clients send them (streaming prefill, 4.4.4): JSON objects, the first of which has the
parameters, each of the others a part of the prompt.

Owns the bounds: of a message, of all of them together, and of the time in which one must come. `Messages` come from
the lines of a request body or from a WebSocket. Whoever reads them gets ApiError, or ClientGoneError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeAlias

from fastapi import WebSocket

from quire.interfaces.server.openai.requests import PromptPiece
from quire.interfaces.server.request_body import BodyChunks, in_bytes, read_text
from quire.interfaces.server.wire.errors import ApiError, ClientGoneError, idle, invalid
from quire.interfaces.server.wire.field_rules import FieldRules

Messages: TypeAlias = AsyncGenerator[bytes, None]

MAX_PIECE_BYTES = 2**20
# A message must be there so long after the one before it. An empty piece is one, too.
IDLE_SECONDS = 60.0

_RULES = FieldRules(PromptPiece, {})


async def pieces_of(messages: Messages, first: str | list[int] | None, what: str) -> AsyncIterator[str | list[int]]:
    """The pieces up to the final one; at least one. `what`: what errors call a message that is not even JSON."""
    is_there = first is not None
    if first is not None:
        yield first
    async for data in messages:
        piece = read_text(data, PromptPiece, _RULES, strict=True, what=what)
        if piece.text is not None and piece.token_ids is not None:
            raise invalid("text, token_ids: a piece has one of them.", "token_ids")
        if piece.text is None and piece.token_ids is None and not piece.is_final:
            raise invalid("A piece has text, token_ids or is_final.", "text")
        for given in (piece.text, piece.token_ids):
            if given is not None:
                is_there = True
                yield given
        if piece.is_final:
            break
    if not is_there:
        text = "prompt: no piece came. Send at least one, with text or token_ids, or the first one as prompt."
        raise invalid(text, "prompt")


async def bounded(messages: Messages, max_bytes: int) -> Messages:
    """No message and no sum of them is too large, and none keeps the engine waiting for ever."""
    size = 0
    while True:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                data = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError:
            text = f"No piece came for {IDLE_SECONDS:g} seconds. Send an empty one to keep the request alive."
            raise idle(text) from None
        size += len(data)
        if len(data) > MAX_PIECE_BYTES:
            raise too_large()
        if size > max_bytes:
            raise ApiError(413, f"The pieces together are larger than {in_bytes(max_bytes)}.")
        yield data


def too_large() -> ApiError:
    return ApiError(413, f"A piece is larger than {MAX_PIECE_BYTES // 2**20} MiB. Send it as several.")


async def lines_of(body: BodyChunks) -> Messages:
    """The lines of a request body, as they arrive. Empty ones are left out."""
    parts: list[bytes] = []
    size = 0
    while not body.is_over:
        *complete, rest = (await body.take()).split(b"\n")
        for end in complete:
            line = b"".join([*parts, end])
            parts = []
            size = 0
            if line.strip():
                yield line
        parts.append(rest)
        size += len(rest)
        if size > MAX_PIECE_BYTES:
            raise too_large()
    if (line := b"".join(parts)).strip():
        yield line


async def socket_messages(socket: WebSocket) -> Messages:
    """The texts that come over a WebSocket."""
    while True:
        message: dict[str, Any] = dict(await socket.receive())
        if message["type"] == "websocket.disconnect":
            raise ClientGoneError
        text = message.get("text")
        if text is None:
            raise invalid("Messages must be texts, each a JSON object.")
        yield text.encode()
