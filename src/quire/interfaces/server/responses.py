"""Answers as structs. A field that OpenAI always sends is always sent, also when it is null."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from quire.version import __version__

SYSTEM_FINGERPRINT = f"quire-{__version__}"


class CachedTokens(msgspec.Struct):
    """Prompt tokens that were not computed again."""

    cached_tokens: int = 0


class CompletionTokens(msgspec.Struct):
    """Reasoning is not told apart yet. Predictions are those of the engine's own speculation."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """OpenAI's `usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens


class TopLogprob(msgspec.Struct):
    """One of the best tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The chosen token at a position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a completion choice: columns, one entry a token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def extend(self, other: CompletionLogprobs) -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


class FunctionCall(msgspec.Struct, kw_only=True):
    """What is called; the arguments are JSON, written as a string."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the client is to make."""

    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's message. Fields that are UNSET are not sent."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    # two names of the same, as in vLLM
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """POST /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str = SYSTEM_FINGERPRINT
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionChoice(msgspec.Struct):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(msgspec.Struct, kw_only=True):
    """POST /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str = SYSTEM_FINGERPRINT


def usage_of(
    num_prompt: int, num_generated: int, num_cached: int, num_drafted: int = 0, num_accepted: int = 0
) -> Usage:
    details = CompletionTokens(0, num_accepted, num_drafted - num_accepted)
    return Usage(num_prompt, num_generated, num_prompt + num_generated, CachedTokens(num_cached), details)


def new_id(prefix: str) -> str:
    """Never a client's id: two clients may send the same one."""
    return f"{prefix}-{secrets.token_hex(12)}"


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

    def event(self, choice: bytes) -> bytes:
        """`choice` is one encoded choice."""
        return self._head + choice + self._tail

    def usage_event(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + msgspec.json.encode(usage) + b"}" + self._closing
