"""What POST /v1/responses takes: fields, what is refused and ignored, and the chat that they ask for."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.requests import ChatRequest, DialectFields, StreamOptions
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.field_rules import Refused, check_metadata

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    "reasoning.encrypted_content", _LOGPROBS,
)  # fmt: skip


class TextField(msgspec.Struct, forbid_unknown_fields=True):
    """`text`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(DialectFields, kw_only=True):
    """POST /v1/responses."""

    input: Annotated[
        str | list[Any] | None,
        Meta(description="a text, or items: messages, function_call, function_call_output, reasoning"),
    ] = None
    instructions: Annotated[str | None, Meta(description="a system message; not inherited from earlier turns")] = None
    previous_response_id: Annotated[str | None, Meta(description="the stored response that this one follows")] = None
    store: Annotated[bool | None, Meta(description="default true: keep the response for later")] = None
    background: Annotated[
        bool | None, Meta(description="answer at once with status queued; the response is looked at with GET")
    ] = None
    max_output_tokens: Annotated[int | None, Meta(description="default: up to the model's length")] = None
    text: Annotated[
        TextField | None,
        Meta(description="`format`: text, json_object or json_schema; `verbosity` is accepted and has no effect"),
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description="of type function, at most 128; no other type is built in")
    ] = None
    tool_choice: Annotated[
        Any, Meta(description="none, auto, required, a function, or allowed_tools: then the model sees no others")
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: calls after the first are dropped")] = None
    top_logprobs: Annotated[
        int | None, Meta(description=f"0 to 20 best tokens at each place; needs `{_LOGPROBS}` in `include`")
    ] = None
    include: Annotated[
        list[str] | None, Meta(description=f"`{_LOGPROBS}`; the other names of the API ask for what is never there")
    ] = None
    truncation: Annotated[
        str | None, Meta(description="disabled, or auto: the oldest turns are left out if the input is too long")
    ] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="up to 16 pairs of text, kept with the response")] = (
        None
    )
    reasoning: Annotated[
        dict[str, Any] | None,
        Meta(description="`effort`: reasoning_effort of a chat; `summary` is accepted and has no effect: thoughts are "
             "given as they are"),
    ] = None  # fmt: skip
    enable_response_messages: Annotated[
        bool | None, Meta(description="vLLM's: what the model was given and what it wrote, as texts and tokens, too")
    ] = None
    stop: Annotated[str | list[str] | None, Meta(description="as in a chat: strings that end the text")] = None
    stream_options: Annotated[
        StreamOptions | None, Meta(description="include_obfuscation: hide the lengths of tokens")
    ] = None


_CHAT_NAMES = "it belongs to /v1/chat/completions"
REFUSED: dict[str, Refused] = {
    "background_options": Refused("a response in the background begins at once, and is not continued"),
    "conversation": Refused("conversations are not stored as such; use previous_response_id"),
    "prompt": Refused("no prompts are stored here; send instructions and input"),
    "context_management": Refused("nothing is compacted; use truncation", ([],)),
    "moderation": Refused("nothing is moderated here"),
    "access_programs": Refused("there is one kind of access"),
    "image": Refused("an image is a part of a message here"),
    "n": Refused("a response is one answer", (1,)),
    "messages": Refused(f"{_CHAT_NAMES}; use input"),
    "max_tokens": Refused(f"{_CHAT_NAMES}; use max_output_tokens"),
    "max_completion_tokens": Refused(f"{_CHAT_NAMES}; use max_output_tokens"),
    "response_format": Refused(f"{_CHAT_NAMES}; use text.format"),
    "logprobs": Refused(f"{_CHAT_NAMES}; use include and top_logprobs", (False,)),
    "logit_bias": Refused(f"{_CHAT_NAMES}", ({},)),
    "reasoning_effort": Refused(f"{_CHAT_NAMES}; use reasoning.effort"),
    "include_reasoning": Refused(f"{_CHAT_NAMES}; take the items of the type reasoning out", (True,)),
}
_IGNORED = {"max_tool_calls": "it counts calls of built-in tools, and there are none"}
RULES = rules_for(ResponsesRequest, REFUSED, ignored=_IGNORED)

# What a chat calls its fields, and what they are called here.
NAMES = {
    r"messages": "input",
    r"max_completion_tokens|max_tokens": "max_output_tokens",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"response_format": "text.format",
    r"reasoning_effort": "reasoning.effort",
}
_REASONING = ("effort", "summary", "generate_summary")


def chat_of(body: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """Raises ApiError for values that a chat would not find wrong in the same words."""
    wants_logprobs = _check_include(body)
    return ChatRequest(
        **body.as_in_a_chat(),
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        response_format=_response_format(body.text),
        tools=_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        stop=body.stop,
        reasoning_effort=(body.reasoning or {}).get("effort"),
    )


def check(body: ResponsesRequest) -> None:
    """What can be checked before anything is looked up."""
    if body.truncation not in (None, "auto", "disabled"):
        raise invalid(f"truncation={body.truncation[:40]!r}: must be auto or disabled.", "truncation")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only with stream=true.", "stream_options")
    if body.stream_options is not None and body.stream_options.include_usage:
        raise invalid("stream_options.include_usage: the last event always has the usage. Leave it out.",
                      "stream_options.include_usage")  # fmt: skip
    if body.background and (body.stream or body.store is False):
        other = "stream" if body.stream else "store"
        text = "is not sent as a stream" if body.stream else "must be stored, there is no other way to get it"
        raise invalid(f"{other}={str(getattr(body, other)).lower()}: a response in the background {text}.", other)
    check_metadata(body.metadata)
    _check_reasoning(body.reasoning or {})


def _check_reasoning(reasoning: dict[str, Any]) -> None:
    for name, value in reasoning.items():
        if name not in _REASONING:
            text = f"unknown field. There are {', '.join(_REASONING)}"
            raise invalid(f"reasoning.{name[:40]}: {text}.", f"reasoning.{name[:40]}")
        if value is not None and not isinstance(value, str):
            raise invalid(f"reasoning.{name}: must be a string or null.", f"reasoning.{name}")


def _check_include(body: ResponsesRequest) -> bool:
    """Whether log-probabilities are asked for."""
    for name in body.include or ():
        if name not in _INCLUDABLE:
            raise invalid(f"include: {name[:64]!r} is none of {', '.join(_INCLUDABLE)}.", "include")
    wants_logprobs = _LOGPROBS in (body.include or ())
    if body.top_logprobs and not wants_logprobs:
        raise invalid(f"top_logprobs={body.top_logprobs}: needs {_LOGPROBS} in include.", "top_logprobs")
    return wants_logprobs


def _response_format(text: TextField | None) -> dict[str, Any] | None:
    form = text.format if text is not None else None
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


def _tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    """As a chat has them; with allowed_tools only those."""
    if body.tools is None:
        return None
    allowed = _allowed(body.tool_choice)
    tools = []
    for number, tool in enumerate(body.tools):
        if tool.get("type") != "function":
            text = "no tools are built in, only functions of the client can be called"
            raise invalid(f"tools[{number}].type={str(tool.get('type'))[:40]!r}: not supported: {text}.",
                          f"tools[{number}].type")  # fmt: skip
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        if allowed is None or str(tool.get("name")) in allowed:
            tools.append({"type": "function", "function": function})
    if allowed is not None and len(tools) < len(allowed):
        raise invalid("tool_choice.tools: names a function that is none of the tools.", "tool_choice.tools")
    return tools


def _allowed(choice: Any) -> set[str] | None:
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    tools = choice.get("tools")
    names = [tool.get("name") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if not names or not all(isinstance(name, str) for name in names) or choice.get("mode") not in ("auto", "required"):
        text = '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [{"type": "function", "name": ...}]}'
        raise invalid(f"tool_choice: must be {text}.", "tool_choice")
    return {str(name) for name in names}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return choice.get("mode")
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice not in (None, "none", "auto", "required"):
        text = 'must be "none", "auto", "required", a function by its name, or allowed_tools'
        raise invalid(f"tool_choice: {text}; no tools are built in.", "tool_choice")
    return choice
