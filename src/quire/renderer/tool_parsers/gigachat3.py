"""GigaChat 3: `<|function_call|>{"name": ..., "arguments": {...}}`, or a message of the role `function call`."""

from __future__ import annotations

from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.json_text import read_call

_MARK, _END_OF_MESSAGE = "<|function_call|>", "<|message_sep|>"
_ROLE = "function call<|role_sep|>\n"

FORMAT = ToolFormat(
    name="gigachat3",
    read=lambda reader: reader.attempts((_MARK, f"{_END_OF_MESSAGE}\n\n{_ROLE}", _ROLE), read_call),
    # each is a token of its own
    marks=(_MARK, _END_OF_MESSAGE, "<|role_sep|>"),
    is_taught_by=lambda template: "function call<|role_sep|>" in template or _MARK in template,
)
