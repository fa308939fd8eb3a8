"""What the endpoints of messages answer, for /openapi.json. A test holds real answers against it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.interfaces.server.openai.kv_transfer import KVTransferParams


class Failure(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class FailureAnswer(msgspec.Struct):
    """The body of every error of this API."""

    type: Literal["error"]
    error: Failure


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """What the user reads."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model wrote for itself; it is not signed."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool that the client is to use."""

    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(msgspec.Struct):
    """Tokens that were read from the cache are not among input_tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(msgspec.Struct):
    """The assistant's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    # where another server goes on
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class MessageEvent(msgspec.Struct):
    """One event of a stream; `type` says which of the others it has."""

    type: str
    message: MessageObject | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: TextBlock | ThinkingBlock | ToolUseBlock | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    """How long a prompt is."""

    input_tokens: int
