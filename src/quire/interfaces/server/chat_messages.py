"""The list of messages of a chat, checked and in the form that chat templates expect."""

from __future__ import annotations

import json
import re
from typing import Any

from quire.interfaces.server.errors import invalid

MAX_MESSAGES = 4096
MAX_TOOLS = 128
# Templates of today know no developer; OpenAI put the role in the place of system.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with plain text as content and tool arguments as objects, or ApiError that names the place."""
    if not messages:
        raise invalid("messages: must not be empty.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid(f"messages: {len(messages)} messages, at most {MAX_MESSAGES} are allowed.", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        shown = repr(role)[:60]
        raise invalid(f"{where}.role: must be one of {', '.join(_ROLES)}, not {shown}.", f"{where}.role")
    checked = {name: value for name, value in message.items() if value is not None}
    checked["role"] = _ROLES[role]
    if checked.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], f"{where}.tool_calls")
    may_be_silent = role == "assistant"
    if "content" in checked:
        checked["content"] = _text(checked["content"], f"{where}.content")
    elif may_be_silent:
        checked["content"] = ""
    else:
        raise invalid(f"{where}.content: this field is required.", f"{where}.content")
    return checked


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}: must be a string or a list of text parts.", where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        # a refusal is text that the assistant once answered
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            what = f"type {str(kind)[:40]!r} is not supported"
            raise invalid(f"{where}[{index}]: {what}; this server takes text.", f"{where}[{index}].type")
        if not isinstance(text, str):
            raise invalid(f"{where}[{index}].text: must be a string.", f"{where}[{index}].text")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Templates take arguments as an object, the API has them as a string."""
    if not isinstance(calls, list):
        raise invalid(f"{where}: must be a list.", where)
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}[{index}].function: must be an object with a name.", f"{where}[{index}].function")
        arguments = _arguments(function.get("arguments", {}), f"{where}[{index}].function.arguments")
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise invalid(f"{where}: must be a JSON object, written as a string.", where) from None
    if not isinstance(arguments, dict):
        raise invalid(f"{where}: must be a JSON object, written as a string.", where)
    return arguments


def checked_tools(tools: list[dict[str, Any]] | None, choice: Any) -> list[dict[str, Any]] | None:
    """Tools for the template; None if there are none or `tool_choice` is none."""
    if choice not in (None, "none", "auto"):
        raise invalid(
            "tool_choice: only 'none' and 'auto' are supported yet; calls are not enforced or parsed.", "tool_choice"
        )
    if not tools:
        if choice == "auto":
            raise invalid("tool_choice: needs tools.", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools: {len(tools)} tools, at most {MAX_TOOLS} are allowed.", "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]", names)
    # a model that does not see the tools does not call them
    return None if choice == "none" else tools


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
