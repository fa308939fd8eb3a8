"""Step 3: a list between markers, each call in tags.

`<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather"><steptml:parameter
name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>`
"""

from __future__ import annotations

from quire.renderer.output_parsing.answer import Malformed
from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.reader import Reader, Steps
from quire.renderer.tool_parsers.invoke import Tags

_LIST, _END_OF_LIST = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _KIND, _END_OF_CALL = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"
_TAGS = Tags("steptml:", on_own_lines=False)


def _calls(reader: Reader) -> Steps[None]:
    yield from reader.each_behind(_CALL, _call)
    yield from reader.literal(_END_OF_LIST)


def _call(reader: Reader) -> Steps[None]:
    _, mark = yield from reader.text_until((_KIND, _END_OF_CALL))
    if mark != _KIND:
        raise Malformed
    yield from reader.expect(_TAGS.invoke)
    yield from _TAGS.read(reader)
    yield from reader.follows(_END_OF_CALL)


FORMAT = ToolFormat(
    name="step3",
    read=lambda reader: reader.attempts((_LIST,), _calls),
    marks=(_LIST, _END_OF_LIST, _CALL, _KIND, _END_OF_CALL),
    is_taught_by=lambda template: _LIST in template,
)
