"""The form of an answer that must be a call of a tool: for tool_choice "required" or a named one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.structured_outputs_params import StructuredOutputsParams

# As Python writes JSON, and chat templates with it, or without any.
_SPACES = {"x-guidance": {"whitespace_pattern": " "}}


def tool_calls_form(
    tools: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    begin: str = "<tool_call>\n",
    end: str = "\n</tool_call>",
    between: str = "\n",
    arguments: str = "arguments",
    most_calls: int = 1,
) -> StructuredOutputsParams:
    """One call or more of these tools (OpenAI's `tools`), or of the one with this name, as a chat template writes them:
    `begin`, {"name": ..., arguments: {...}}, `end`, with `between` from one to the next.

    A tool's parameters must be a schema that `structured_outputs.json` takes; it is checked like any other form. The
    caller makes sure that the name is that of a tool.
    """
    functions = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    rules = []
    for number, function in enumerate(functions):
        call = {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: function.get("parameters") or {"type": "object"},
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        rules.append(f"call_{number}: {_literal(begin)} %json {json.dumps(_with_definitions(call, arguments))}")
        rules[-1] += f" {_literal(end)}"
    any_call = " | ".join(f"call_{number}" for number in range(len(functions)))
    more = f" ({_literal(between)} call)~0..{most_calls - 1}" if most_calls > 1 else ""
    return StructuredOutputsParams(grammar="\n".join([f"start: call{more}", f"call: {any_call}", *rules]))


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _with_definitions(call: dict[str, Any], arguments: str) -> dict[str, Any]:
    """References of the parameters begin at their root, which is not the root of the call."""
    parameters = call["properties"][arguments]
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    inner = {key: value for key, value in parameters.items() if key not in shared}
    return {**_SPACES, **shared, **call, "properties": {**call["properties"], arguments: inner}}
