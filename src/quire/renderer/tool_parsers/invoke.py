"""Calls in tags that say what they are, which several families write with marks of their own around.

`<invoke name="weather"><parameter name="city">Paris</parameter></invoke>`
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.renderer.output_parsing.answer import Malformed
from quire.renderer.output_parsing.bare_values import BareArguments, read_arguments_in_tags
from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.reader import Reader, Steps

_LABEL = re.compile(r"[^\"<>\n]+")
_ATTRIBUTES = {"": None, ' string="true"': True, ' string="false"': False}


@dataclass(frozen=True)
class Tags:
    """`prefix`: what all names of tags begin with; `call`, `parameter`: how they go on."""

    prefix: str
    on_own_lines: bool
    call: str = "invoke"
    parameter: str = "parameter"

    @property
    def invoke(self) -> str:
        return f'<{self.prefix}{self.call} name="'

    def read(self, reader: Reader) -> Steps[None]:
        """What follows `invoke`, up to the end of the call."""
        function, is_text = yield from _label(reader)
        if is_text is not None:
            raise Malformed
        opening, closing = f'<{self.prefix}{self.parameter} name="', f"</{self.prefix}{self.call}>"
        yield from read_arguments_in_tags(
            reader, function, opening, closing, self._pair, on_own_lines=self.on_own_lines
        )

    def _pair(self, reader: Reader, arguments: BareArguments) -> Steps[None]:
        key, is_text = yield from _label(reader)
        yield from arguments.read_value(key, f"</{self.prefix}{self.parameter}>", is_text=is_text)


def calls_in_tags(name: str, block: str, prefix: str, *, on_own_lines: bool) -> ToolFormat:
    """`block`: the tag around calls that follow each other."""
    opening, closing = f"<{block}>", f"</{block}>"
    tags = Tags(prefix, on_own_lines)

    def calls(reader: Reader) -> Steps[None]:
        yield from reader.each_behind(tags.invoke, tags.read)
        yield from reader.literal(closing)

    return ToolFormat(
        name=name,
        read=lambda reader: reader.attempts((opening,), calls),
        marks=(opening, closing, prefix) if prefix else (opening, closing),
        is_taught_by=lambda template: opening in template and tags.invoke in template,
    )


def _label(reader: Reader) -> Steps[tuple[str, bool | None]]:
    """A name, and what is said of the value's kind."""
    label = yield from reader.word(_LABEL)
    if not (yield from reader.literal('"')):
        raise Malformed
    attributes, _ = yield from reader.text_until((">",))
    if attributes.rstrip() not in _ATTRIBUTES:
        raise Malformed
    return label, _ATTRIBUTES[attributes.rstrip()]
