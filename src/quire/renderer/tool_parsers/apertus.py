"""Apertus: `<|tools_prefix|>[{"weather": {"city": "Paris"}}, ...]<|tools_suffix|>`."""

from __future__ import annotations

from quire.renderer.output_parsing.answer import Malformed
from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.json_text import read_arguments, read_text
from quire.renderer.output_parsing.reader import Reader, Steps

_OPEN, _CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"


def _calls(reader: Reader) -> Steps[None]:
    yield from reader.expect("[")
    is_more = True
    while is_more:
        yield from reader.expect("{")
        yield from reader.next_letter()
        name = yield from read_text(reader)
        if not name:
            raise Malformed
        yield from reader.expect(":")
        yield from read_arguments(reader, name)
        yield from reader.expect("}")
        reader.accept()
        is_more = yield from reader.goes_on(",", "]")
    yield from reader.follows(_CLOSE)


FORMAT = ToolFormat(
    name="apertus",
    read=lambda reader: reader.attempts((_OPEN,), _calls),
    # each is a token of its own
    marks=(_OPEN, _CLOSE),
    is_taught_by=lambda template: _OPEN in template,
)
