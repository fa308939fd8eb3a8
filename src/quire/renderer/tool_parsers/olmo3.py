"""Olmo 3: calls as Python writes them, one a line, between `<function_calls>` and `</function_calls>`."""

from __future__ import annotations

from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.reader import Reader, Steps
from quire.renderer.tool_parsers.pythonic import read_python_call

_OPEN, _CLOSE = "<function_calls>", "</function_calls>"


def _calls(reader: Reader) -> Steps[None]:
    yield from read_python_call(reader)
    while (yield from reader.next_letter()) not in ("<", ""):
        yield from read_python_call(reader)
    yield from reader.literal(_CLOSE)


FORMAT = ToolFormat(
    name="olmo3",
    read=lambda reader: reader.attempts((_OPEN,), _calls),
    marks=(_OPEN, _CLOSE),
    is_taught_by=lambda template: _OPEN in template,
)
