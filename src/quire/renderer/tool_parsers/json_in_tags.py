"""Calls that several families write as JSON, one or a list of them, between marks of their own."""

from __future__ import annotations

from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.json_text import read_call, read_calls
from quire.renderer.output_parsing.reader import Reader, Steps


def json_in_tags(name: str, opening: str, closing: str = "", *, taught: str = "") -> ToolFormat:
    """`taught`: what a chat template that teaches the format holds, where that is not the opening."""

    def calls(reader: Reader) -> Steps[None]:
        is_list = (yield from reader.next_letter()) == "["
        yield from read_calls(reader) if is_list else read_call(reader)
        if closing:
            yield from reader.follows(closing)

    return ToolFormat(
        name=name,
        read=lambda reader: reader.attempts((opening,), calls),
        marks=(opening, closing) if closing else (opening,),
        is_taught_by=lambda template: (taught or opening) in template,
    )
