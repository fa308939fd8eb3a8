"""Granite 3.2 and 3.3: plain words say where a thought begins and where the answer does."""

from __future__ import annotations

from quire.renderer.output_parsing.answer import Malformed
from quire.renderer.output_parsing.format import ReasoningFormat
from quire.renderer.output_parsing.reader import Reader, Steps

_BEGINNINGS = ("Here is", "Here's")
_THOUGHT, _ANSWER = " my thought process:", " my response:"
_CLOSINGS = tuple(beginning + _ANSWER for beginning in _BEGINNINGS)


def _read(reader: Reader, is_open: bool) -> Steps[None]:
    if not is_open and (yield from reader.attempt("", _opened(reader))) is None:
        return
    yield from reader.until(_CLOSINGS, reader.reasoning)
    reader.end_reasoning()


def _opened(reader: Reader) -> Steps[bool]:
    yield from reader.next_letter()
    for beginning in _BEGINNINGS:
        if (yield from reader.literal(beginning)):
            yield from reader.expect(_THOUGHT.strip())
            return True
    raise Malformed


FORMAT = ReasoningFormat(
    name="granite",
    read=_read,
    is_taught_by=lambda template: _BEGINNINGS[0] + _THOUGHT in template or _BEGINNINGS[1] + _THOUGHT in template,
)
