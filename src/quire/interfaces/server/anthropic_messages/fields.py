"""What POST /v1/messages takes: fields, what is refused and ignored, and the chat that they ask for."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.interfaces.server.anthropic_messages.blocks import messages_of
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.rendering import thinking_switch
from quire.interfaces.server.openai.requests import ChatRequest, DialectFields
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.field_rules import Refused

_MIN_BUDGET = 1024
# more than any model writes
_MOST_BUDGET = 2**31 - 1


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config`."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class PromptFields(DialectFields, kw_only=True):
    """What decides over the tokens of the prompt."""

    messages: Annotated[
        list[Any],
        Meta(description="of user and assistant; blocks: text, thinking, tool_use, tool_result. A last one of the "
             "assistant is continued"),
    ]  # fmt: skip
    system: Annotated[str | list[Any] | None, Meta(description="a text, or text blocks")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description="with name, description, input_schema; at most 128")
    ] = None
    tool_choice: Annotated[
        dict[str, Any] | None,
        Meta(description="auto, any, tool or none; disable_parallel_tool_use drops further calls"),
    ] = None
    thinking: Annotated[
        dict[str, Any] | None,
        Meta(description="enabled, adaptive or disabled (default): the template's `enable_thinking` or "
             "`thinking`; `display` omitted "
             "hides the text; after `budget_tokens` they end"),
    ] = None  # fmt: skip
    output_config: Annotated[
        OutputConfig | None, Meta(description="`format` of type json_schema; `effort`: reasoning_effort of a chat")
    ] = None


class MessagesRequest(PromptFields, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(description="required; cut to what the model's length leaves")]
    stop_sequences: Annotated[list[str] | None, Meta(description="texts that end the answer")] = None
    kv_transfer_params: Annotated[
        dict[str, Any] | None, Meta(description="vLLM's: which half of the request this server has")
    ] = None


class CountTokensRequest(PromptFields, kw_only=True):
    """POST /v1/messages/count_tokens."""


# An edit that asks for nothing. Programs send it as a matter of course.
_KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}
_FETCH = Refused("the server fetches and runs nothing", ([],))
REFUSED: dict[str, Refused] = {
    "container": Refused("nothing is run in containers here"),
    "mcp_servers": _FETCH,
    "context_management": Refused("nothing is compacted or cleared", ({}, {"edits": []}, {"edits": [_KEEP_THOUGHTS]})),
    "diagnostics": Refused("there are none"),
    "stop": Refused("it belongs to /v1/chat/completions; use stop_sequences"),
    "max_completion_tokens": Refused("it belongs to /v1/chat/completions; use max_tokens"),
    "response_format": Refused("it belongs to /v1/chat/completions; use output_config.format"),
    "output_format": Refused("it was a beta; use output_config.format"),
    "n": Refused("a message is one answer", (1,)),
    "input": Refused("it belongs to /v1/responses; use messages"),
    "reasoning_effort": Refused("it belongs to /v1/chat/completions; use output_config.effort"),
    "include_reasoning": Refused("it belongs to /v1/chat/completions; use thinking.display", (True,)),
}
_IGNORED = {
    "metadata": "the client's name for its user",
    "speed": "a hint for speed",
    "inference_geo": "the server stands where it stands",
    "user_profile_id": "the client's name for its user",
    "workspace_id": "the client's name for its part of an organisation",
    "anthropic_version": "there is one version; so is the header",
    "betas": "features are not told apart by names; so is the header",
}
RULES = rules_for(MessagesRequest, REFUSED, ignored=_IGNORED)
COUNT_RULES = rules_for(CountTokensRequest, REFUSED, ignored=_IGNORED)

# What a chat calls its fields, and what they are called here. The system message is the chat's first.
NAMES = {
    r"max_completion_tokens": "max_tokens",
    r"stop": "stop_sequences",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    r"response_format": "output_config.format",
    r"reasoning_effort": "output_config.effort",
}


def chat_of(body: MessagesRequest | CountTokensRequest, *, sees_images: bool) -> ChatRequest:
    """Raises ApiError for values that a chat would not find wrong in the same words."""
    messages = messages_of(body.system, body.messages, sees_images=sees_images)
    continues = messages[-1]["role"] == "assistant"
    choice = body.tool_choice or {}
    chat = ChatRequest(
        **{**body.as_in_a_chat(), "chat_template_kwargs": _template_kwargs(body)},
        messages=messages,
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
        continue_final_message=continues or None,
        response_format=_response_format(body.output_config),
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
    )
    if isinstance(body, MessagesRequest):
        chat.max_completion_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        chat.kv_transfer_params = body.kv_transfer_params
        chat.stream = body.stream
    else:
        # it has nothing to do with the prompt
        chat.thinking_token_budget = None
    return chat


def hides_thinking(body: PromptFields) -> bool:
    return (body.thinking or {}).get("display") == "omitted"


def thinking_budget(body: MessagesRequest) -> int | None:
    """Tokens that its thoughts may have by `thinking`, which cannot be wrong any more."""
    thinking = body.thinking or {}
    return min(thinking["budget_tokens"], _MOST_BUDGET) if thinking.get("type") == "enabled" else None


def _template_kwargs(body: PromptFields) -> dict[str, Any]:
    """Nobody who did not ask for thoughts expects a thinking block. Templates that know no such switch ignore it."""
    thinking = body.thinking or {"type": "disabled"}
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise invalid(f"thinking.type={str(kind)[:40]!r}: must be enabled, adaptive or disabled.", "thinking.type")
    budget = thinking.get("budget_tokens")
    if kind == "enabled" and budget is None:
        raise invalid("thinking.budget_tokens: this field is required.", "thinking.budget_tokens")
    if kind == "enabled" and not (type(budget) is int and budget >= _MIN_BUDGET):
        text = f"must be a whole number of at least {_MIN_BUDGET}"
        raise invalid(f"thinking.budget_tokens={str(budget)[:40]}: {text}.", "thinking.budget_tokens")
    if thinking.get("display") not in (None, "summarized", "omitted"):
        raise invalid("thinking.display: must be summarized or omitted.", "thinking.display")
    return {**thinking_switch(is_on=kind != "disabled"), **(body.chat_template_kwargs or {})}


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if tools is None else [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        text = "no tools are built in, only the client's own can be called"
        raise invalid(f"{where}.type={str(tool['type'])[:40]!r}: not supported: {text}.", f"{where}.type")
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{where}.input_schema: this field is required, a JSON schema.", f"{where}.input_schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> Any:
    if choice is None:
        return None
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case other:
            text = "must be auto, any, tool (with a name) or none"
            raise invalid(f"tool_choice.type={str(other)[:40]!r}: {text}.", "tool_choice.type")


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    form = config.format if config is not None else None
    if form is None:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        text = 'must be {"type": "json_schema", "schema": a JSON schema}'
        raise invalid(f"output_config.format: {text}.", "output_config.format")
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
