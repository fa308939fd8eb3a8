"""The tools of a chat, checked, and how a call is enforced. Messages are checked where they are rendered, for all
interfaces alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.beam_search_params import GenerationParams
from quire.interfaces.server.wire.errors import ApiError, invalid
from quire.renderer.output_formats import OutputFormats
from quire.structured_output.tool_calls import tool_calls_form

MAX_TOOLS = 128
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
# of an answer that must call, and may call several
_MOST_CALLS = 16
_PARAM = "tool_choice"


@dataclass(frozen=True)
class ToolChoice:
    """What a request says about tools."""

    # for the template; a model that does not see the tools does not call them
    tools: list[dict[str, Any]] | None = None
    must_call: bool = False
    # the only one that may be called, by its name; None: any
    name: str | None = None


NO_TOOLS = ToolChoice()


def tool_choice_of(tools: list[dict[str, Any]] | None, choice: Any) -> ToolChoice:
    """Raises ApiError for what is wrong."""
    name = _named(choice)
    if not tools:
        if choice not in (None, "none"):
            raise invalid("tool_choice: needs tools.", _PARAM)
        return NO_TOOLS
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools: {len(tools)} tools, at most {MAX_TOOLS} are allowed.", "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]", names)
    if name is not None and name not in names:
        raise invalid(f"tool_choice: {name[:64]!r} is none of the tools.", _PARAM)
    if choice == "none":
        return NO_TOOLS
    return ToolChoice(tools, must_call=choice == "required" or name is not None, name=name)


def _named(choice: Any) -> str | None:
    """The function that is to be called."""
    if choice in (None, "none", "auto", "required"):
        return None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    shown = msgspec.json.encode(choice).decode()[:100]
    text = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    raise invalid(f"tool_choice={shown}: {text}.", _PARAM)


def _check_tool(tool: dict[str, Any], where: str, names: set[str]) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise invalid(f"{where}: must be of type function and hold a function.", where)
    name = function.get("name")
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        text = "1 to 64 letters, digits, underscores, dots or dashes are allowed"
        raise invalid(f"{where}.function.name: {text}.", f"{where}.function.name")
    if name in names:
        raise invalid(f"{where}.function.name: {name!r} occurs twice.", f"{where}.function.name")
    names.add(name)
    if not isinstance(function.get("parameters", {}), dict):
        raise invalid(f"{where}.function.parameters: must be an object.", f"{where}.function.parameters")


def with_call_enforced(
    params: GenerationParams, choice: ToolChoice, formats: OutputFormats, *, parallel_calls: bool
) -> GenerationParams:
    """The same parameters for an answer that is nothing but calls: structured output lets nothing else through."""
    assert choice.tools is not None
    if params.structured_outputs is not None:
        raise _cannot("the answer has another form already. Leave out response_format or tool_choice")
    if formats.tool is None:
        raise _cannot("it is not known how this model calls tools. Start the server with tool_call_parser=NAME")
    form = formats.tool.json_form
    if form is None:
        raise _cannot(f"calls in the format {formats.tool.name} are not bound to a form yet. Use 'auto'")
    most_calls = _MOST_CALLS if parallel_calls and choice.name is None else 1
    grammar = tool_calls_form(
        choice.tools,
        name=choice.name,
        begin=form.begin,
        end=form.end,
        between=form.between,
        arguments=form.arguments,
        most_calls=most_calls,
    )
    return msgspec.structs.replace(params, structured_outputs=grammar)


def _cannot(why: str) -> ApiError:
    return invalid(f"tool_choice: a call cannot be enforced here: {why}.", _PARAM)
