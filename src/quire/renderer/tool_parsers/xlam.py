"""xLAM: an answer that is nothing but `[{"name": ..., "arguments": {...}}, ...]`, bare or fenced as a block of code.

`<tool_call>` or `[TOOL_CALLS]` may stand before. Without them a list is calls only if it names one of the tools,
because an answer in JSON looks the same.
"""

from __future__ import annotations

from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.json_text import read_calls
from quire.renderer.output_parsing.reader import Reader, Steps

_OPEN, _CLOSE, _MARK = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
_FENCE, _JSON, _END_OF_FENCE = "```", "json", "```"


def _read(reader: Reader) -> Steps[None]:
    yield from reader.attempt("", _bare(reader))
    while mark := (yield from reader.content_until((_OPEN, _MARK))):
        yield from reader.attempt(mark, _marked(reader))


def _bare(reader: Reader) -> Steps[None]:
    if (yield from reader.follows(_MARK)) or (yield from reader.literal(_OPEN)):
        yield from _marked(reader)
        return
    is_fenced = yield from reader.literal(_FENCE)
    if is_fenced:
        yield from reader.literal(_JSON)
    yield from read_calls(reader, reader.functions)
    if is_fenced:
        yield from reader.follows(_END_OF_FENCE)


def _marked(reader: Reader) -> Steps[None]:
    yield from read_calls(reader)
    yield from reader.follows(_CLOSE)


FORMAT = ToolFormat(name="xlam", read=_read, marks=(_OPEN, _CLOSE, _MARK))
