"""What the endpoints of responses answer, for /openapi.json. A test holds real answers against it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.interfaces.server.openai.responses import CachedTokens, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A part of a message."""

    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob]


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """What the user reads."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A part of a thought."""

    text: str


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the model wrote for itself. Nothing is summarised."""

    id: str
    status: Status
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function that the client is to call."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class InputTokens(CachedTokens):
    """Nobody pays for writing into the cache."""

    cache_write_tokens: int = 0


class OutputTokens(msgspec.Struct):
    """Of the answer, those that are thoughts."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """What a response took."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    """Why it failed."""

    code: str
    message: str


class RawMessage(msgspec.Struct):
    """What the model sees or writes."""

    message: str
    tokens: list[int]
    type: Literal["raw_message_tokens"] = "raw_message_tokens"


class ResponseObject(msgspec.Struct):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: float | None
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    # with enable_response_messages
    input_messages: list[RawMessage] | UnsetType = UNSET
    output_messages: list[RawMessage] | UnsetType = UNSET


class ResponseEvent(msgspec.Struct):
    """One event of a stream; `type` says which of the others it has."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class DeletedResponse(msgspec.Struct):
    """It is gone."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputTokenCount(msgspec.Struct):
    """How long a prompt would be."""

    input_tokens: int
    object: str = "response.input_tokens"


class ItemList(msgspec.Struct):
    """A page of items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"
