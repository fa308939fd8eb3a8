"""Events of a streamed answer: their form for /openapi.json, and the encoder that writes them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from quire.interfaces.server.openai.responses import (
    SYSTEM_FINGERPRINT,
    ChatLogprobs,
    CompletionLogprobs,
    Usage,
    only,
)

# With include_obfuscation what differs from event to event has a multiple of so many bytes, letters included.
PADDED_BYTES = 256


class FunctionCallDelta(msgspec.Struct, kw_only=True):
    """The name comes first, then pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The first one of a call has its id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Annotated[str | UnsetType, only("function")] = UNSET
    function: FunctionCallDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    """What is new in a message."""

    role: Annotated[str | UnsetType, only("assistant")] = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


def with_token_ids(choice: bytes, **token_ids: Sequence[int]) -> bytes:
    """An encoded choice and its tokens."""
    fields = b"".join(b',"%b":%b' % (name.encode(), msgspec.json.encode(ids)) for name, ids in token_ids.items())
    return choice[:-1] + fields + b"}"


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """What is new in one answer of a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    # with return_token_ids
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    """What is new in one continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    # with return_token_ids; those of the prompt in the first event of a choice
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Chunk(msgspec.Struct, kw_only=True):
    """What all events have."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    # with include_usage: null, and the counts in the last event; with continuous_usage_stats in all of them
    usage: Usage | UnsetType | None = UNSET
    # with enable_per_request_metrics, beside the last counts
    metrics: dict[str, float] | UnsetType = UNSET
    # with include_obfuscation
    obfuscation: str | UnsetType = UNSET


class ChatChunk(Chunk, kw_only=True):
    """An event of POST /v1/chat/completions."""

    object: Annotated[str, only("chat.completion.chunk")]
    choices: list[ChatChunkChoice]
    # with return_token_ids, in the first event
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Chunk, kw_only=True):
    """An event of POST /v1/completions."""

    object: Annotated[str, only("text_completion")]
    choices: list[CompletionChunkChoice]


class _Last(msgspec.Struct):
    """What the last event has in place of a choice."""

    usage: Usage
    metrics: dict[str, float] | UnsetType


class ChunkEncoder:
    """Events of one stream. What is equal in all of them is encoded once; a token costs one string.

    60,000 tokens a second in one process leave 16 microseconds for each, all the way from the socket to the socket.
    """

    def __init__(
        self,
        *,
        response_id: str,
        object_name: str,
        created: int,
        model: str,
        has_usage: bool,
        opening: bytes = b"data: ",
        closing: bytes = b"\n\n",
    ) -> None:
        head = {
            "id": response_id,
            "object": object_name,
            "created": created,
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        # everything up to the list of choices
        self._head = opening + msgspec.json.encode(head)[:-1] + b',"choices":['
        # with include_usage, all events but the last say "usage": null
        self._tail = (b'],"usage":null}' if has_usage else b"]}") + closing
        self._closing = closing

    def event(self, choice: bytes, beside: bytes = b"") -> bytes:
        """`choice` is one encoded choice; `beside`: fields that stand beside the choices, each with a comma before."""
        return self._head + choice + b"]" + beside + self._tail[1:]

    def frame(self, before: bytes, after: bytes) -> tuple[bytes, bytes] | None:
        """What stands around the one part of a choice that differs from event to event, if the rest is always equal."""
        return self._head + before, after + self._tail

    def usage_event(self, usage: Usage, metrics: dict[str, float] | UnsetType = UNSET) -> bytes:
        return self._head + b"]," + msgspec.json.encode(_Last(usage, metrics))[1:] + self._closing


def obfuscation(size: int) -> bytes:
    """The field that fills up an object of which `size` bytes differ from one to the next; it is not the first one."""
    missing = -size % PADDED_BYTES
    # letters that a compressing proxy cannot make short again
    return b',"obfuscation":"%b"' % secrets.token_urlsafe(missing)[:missing].encode()


class PaddingEncoder(ChunkEncoder):
    """The same events, filled up in steps of PADDED_BYTES: who sees only the sizes of encrypted packets does not see
    the lengths of tokens, from which texts have been guessed."""

    def event(self, choice: bytes, beside: bytes = b"") -> bytes:
        return self._padded(super().event(choice, beside), len(choice) + len(beside))

    def frame(self, before: bytes, after: bytes) -> tuple[bytes, bytes] | None:
        return None

    def usage_event(self, usage: Usage, metrics: dict[str, float] | UnsetType = UNSET) -> bytes:
        return self._padded(super().usage_event(usage, metrics), len(msgspec.json.encode(_Last(usage, metrics))))

    def _padded(self, event: bytes, size: int) -> bytes:
        """`size` is the part of it that differs from event to event."""
        end = len(self._closing) + 1
        return event[:-end] + obfuscation(size) + event[-end:]


def encoder_of(*, is_padded: bool) -> type[ChunkEncoder]:
    return PaddingEncoder if is_padded else ChunkEncoder
