"""Qwen 3 Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

`<tool_call>` may be missing.
"""

from __future__ import annotations

import re

from quire.renderer.output_parsing.answer import Malformed
from quire.renderer.output_parsing.bare_values import BareArguments, read_arguments_in_tags
from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.reader import Reader, Steps

_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"
_LABEL = re.compile(r"[^<>\n]+")


def calls_as_functions(name: str, opening: str, closing: str) -> ToolFormat:
    """What stands around each call is the family's own."""

    def read(reader: Reader) -> Steps[None]:
        while mark := (yield from reader.content_until((opening, _FUNCTION))):
            yield from reader.attempt(mark, call(reader, has_opening=mark == opening))

    def call(reader: Reader, *, has_opening: bool) -> Steps[None]:
        if has_opening:
            yield from reader.expect(_FUNCTION)
        function = yield from _label(reader)
        yield from read_arguments_in_tags(reader, function, _PARAMETER, _END_OF_FUNCTION, _pair, on_own_lines=True)
        yield from reader.follows(closing)

    return ToolFormat(
        name=name,
        read=read,
        marks=(opening, closing),
        is_taught_by=lambda template: opening in template and _FUNCTION in template and _PARAMETER in template,
    )


def _pair(reader: Reader, arguments: BareArguments) -> Steps[None]:
    key = yield from _label(reader)
    yield from arguments.read_value(key, _END_OF_PARAMETER)


def _label(reader: Reader) -> Steps[str]:
    label = yield from reader.word(_LABEL)
    if not (yield from reader.literal(">")):
        raise Malformed
    return label.strip()


FORMAT = calls_as_functions("qwen3_coder", "<tool_call>", "</tool_call>")
