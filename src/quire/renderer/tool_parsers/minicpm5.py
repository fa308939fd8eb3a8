"""MiniCPM 5: `<function name="f"><param name="key">value</param></function>`, without a block around them."""

from __future__ import annotations

from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.tool_parsers.invoke import Tags

_TAGS = Tags("", on_own_lines=True, call="function", parameter="param")

FORMAT = ToolFormat(
    name="minicpm5",
    read=lambda reader: reader.attempts((_TAGS.invoke,), _TAGS.read),
    marks=(_TAGS.invoke, "</function>"),
    is_taught_by=lambda template: _TAGS.invoke in template and '<param name="' in template,
)
