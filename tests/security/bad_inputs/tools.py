"""Tools that are none, choices of tools that are not there, schemas of arguments that cannot be followed."""

from __future__ import annotations

from typing import Any

from .case import Case, chat


def _tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def _with(parameters: Any) -> list[dict[str, Any]]:
    return [_tool(parameters=parameters)]


_NAMES = ["", "a b", "a\n", "x" * 65, "\u00e4", "a/b", "a$", "f()", "<f>", "a'b", None, 5, [], {}, True]
_TOOLS: dict[str, Any] = {
    "an empty tool": [{}],
    "no type": [{"function": {"name": "f"}}],
    "another type": [{"type": "web_search", "function": {"name": "f"}}],
    "type null": [{"type": None, "function": {"name": "f"}}],
    "no function": [{"type": "function"}],
    "function a text": [{"type": "function", "function": "f"}],
    "function a list": [{"type": "function", "function": [1]}],
    "no name": [{"type": "function", "function": {}}],
    "the same name twice": [_tool(), _tool()],
    "129 tools": [_tool(f"f{number}") for number in range(129)],
    "100,000 tools": [_tool(f"f{number}") for number in range(100_000)],
    "parameters a text": _with("x"),
    "parameters a list": _with([]),
    "parameters true": _with(True),
    "parameters a number": _with(1),
}
_CHOICES: dict[str, Any] = {
    "unknown word": "always",
    "a tool that is not there": {"type": "function", "function": {"name": "g"}},
    "a choice without a name": {"type": "function", "function": {}},
    "a choice without a function": {"type": "function"},
    "a choice of another type": {"type": "allowed_tools", "tools": []},
    "a choice whose name is a number": {"type": "function", "function": {"name": 5}},
    "a choice whose function is a text": {"type": "function", "function": "f"},
}
# what the arguments of an enforced call must follow
_SCHEMAS: dict[str, Any] = {
    "unknown type": {"type": "thing"},
    "type a number": {"type": 5},
    "properties a list": {"type": "object", "properties": []},
    "required a text": {"type": "object", "required": "a"},
    "a reference to nothing": {"$ref": "#/$defs/none"},
    "a reference to a network": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a reference to a file": {"$ref": "file:///etc/passwd"},
    "a pattern that is none": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
    "a lower bound above the upper": {
        "type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}, "required": ["a"],
    },
    "an empty choice": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
}  # fmt: skip

CASES: list[Case] = [
    *(chat(f"a tool called {name!r}", tools=[_tool(name)]) for name in _NAMES),
    *(chat(name, tools=tools) for name, tools in _TOOLS.items()),
    *(chat(name, tools=[_tool()], tool_choice=choice) for name, choice in _CHOICES.items()),
    *(chat(f"a choice without tools: {choice!r}", tool_choice=choice)
      for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}})),
    *(chat(f"enforced, {name}", tools=_with(schema), tool_choice="required") for name, schema in _SCHEMAS.items()),
    chat("enforced, and a form", tools=[_tool()], tool_choice="required", response_format={"type": "json_object"}),
]  # fmt: skip
