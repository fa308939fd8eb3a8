"""Answers as structs. A field that OpenAI always sends is always sent, also when it is null."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, UnsetType

from quire.interfaces.server.openai.kv_transfer import KVTransferParams
from quire.version import __version__

SYSTEM_FINGERPRINT = f"quire-{__version__}"

_ENDS = ["stop", "length", "content_filter", None]
_ChatEnd = Annotated[str | None, Meta(extra_json_schema={"enum": [*_ENDS, "tool_calls"]})]
_CompletionEnd = Annotated[str | None, Meta(extra_json_schema={"enum": _ENDS})]
_ScoresOfPrompt = list[dict[str, Any] | None] | None


def only(word: str) -> Meta:
    """For /openapi.json: the field holds nothing else."""
    return Meta(extra_json_schema={"const": word})


class CachedTokens(msgspec.Struct):
    """Prompt tokens that were not computed again, and why the next one was (docs/kv-cache.md)."""

    cached_tokens: int = 0
    first_miss: str | UnsetType = msgspec.UNSET


class CompletionTokens(msgspec.Struct):
    """Tokens of thoughts; and predictions, which are those of the engine's own speculation."""

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


class TopLogprob(msgspec.Struct, gc=False):
    """One of the best tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, gc=False):
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
    type: Annotated[str, only("function")] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's message. Fields that are UNSET are not sent."""

    role: Annotated[str, only("assistant")] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = msgspec.UNSET
    # two names of the same, as in vLLM
    reasoning_content: str | UnsetType = msgspec.UNSET
    reasoning: str | UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: _ChatEnd
    stop_reason: int | str | None
    # with return_token_ids
    token_ids: list[int] | UnsetType | None = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """POST /v1/chat/completions."""

    id: str
    object: Annotated[str, only("chat.completion")] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str = SYSTEM_FINGERPRINT
    prompt_logprobs: _ScoresOfPrompt = None
    # with return_token_ids
    prompt_token_ids: list[int] | UnsetType | None = msgspec.UNSET
    # where another server goes on
    kv_transfer_params: KVTransferParams | UnsetType = msgspec.UNSET
    # with enable_per_request_metrics: milliseconds, and tokens in a second
    metrics: dict[str, float] | UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: _CompletionEnd
    stop_reason: int | str | None
    prompt_logprobs: _ScoresOfPrompt = None
    # with return_token_ids
    token_ids: list[int] | UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """POST /v1/completions."""

    id: str
    object: Annotated[str, only("text_completion")] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str = SYSTEM_FINGERPRINT
    kv_transfer_params: KVTransferParams | UnsetType = msgspec.UNSET
    # with enable_per_request_metrics, of one prompt
    metrics: dict[str, float] | UnsetType = msgspec.UNSET
