"""LFM 2: a list of calls as Python writes them, `<|tool_call_start|>[f(x=1), g()]<|tool_call_end|>`."""

from __future__ import annotations

from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.reader import Reader, Steps
from quire.renderer.tool_parsers.pythonic import read_python_calls

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


def _calls(reader: Reader) -> Steps[None]:
    yield from read_python_calls(reader)
    yield from reader.follows(_CLOSE)


FORMAT = ToolFormat(
    name="lfm2",
    read=lambda reader: reader.attempts((_OPEN,), _calls),
    marks=(_OPEN, _CLOSE),
    is_taught_by=lambda template: _OPEN in template,
)
