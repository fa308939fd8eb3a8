"""The tools of a chat, checked. Its messages are checked where they are rendered, for all interfaces alike."""

from __future__ import annotations

import re
from typing import Any

from quire.interfaces.server.errors import invalid

MAX_TOOLS = 128
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


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
