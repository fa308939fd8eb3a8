"""gpt-oss writes Harmony: messages, each with a channel that says whom it is for.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The thoughts are part of the same stream, so `reasoning_parsers/openai_gptoss.py` reads with what is here.
"""

from __future__ import annotations

import re

from quire.renderer.output_parsing.answer import Malformed
from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.json_text import read_arguments
from quire.renderer.output_parsing.reader import Reader, Steps

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_MAX_HEADER = 512


def is_taught_by(template: str) -> bool:
    return _CHANNEL in template and _MESSAGE in template


def read(reader: Reader) -> Steps[None]:
    """All messages, to the end of the answer. Text that belongs to none is content."""
    # the prompt has begun the first one: its header may go on without a mark
    header = yield from reader.attempt("", _rest_of_header(reader))
    if header is not None:
        yield from _body(reader, header)
    while mark := (yield from reader.content_until((_START, _CHANNEL))):
        header = yield from reader.attempt(mark, _header(reader, mark))
        if header is not None:
            yield from _body(reader, header)


def _rest_of_header(reader: Reader) -> Steps[str]:
    yield from reader.expect("to=")
    return (yield from _header(reader, "to="))


def _header(reader: Reader, opening: str) -> Steps[str]:
    header, found = opening, ""
    while found != _MESSAGE:
        part, found = yield from reader.text_until((_CHANNEL, _CONSTRAIN, _MESSAGE))
        header += part + found
        if len(header) > _MAX_HEADER:
            raise Malformed
    return header


def _body(reader: Reader, header: str) -> Steps[None]:
    recipient = _RECIPIENT.search(header)
    name = recipient.group(1) if recipient else ""
    if name.startswith(_FUNCTIONS) and reader.functions:
        yield from reader.attempt("", _call(reader, name.removeprefix(_FUNCTIONS)))
    elif header.partition(_CHANNEL)[2].lstrip().startswith("analysis"):
        yield from reader.until(_ENDS, reader.reasoning)
        reader.end_reasoning()
    else:
        yield from reader.content_until(_ENDS)


def _call(reader: Reader, name: str) -> Steps[None]:
    yield from read_arguments(reader, name)
    yield from reader.next_letter()
    for end in _ENDS:
        if (yield from reader.literal(end)):
            return


FORMAT = ToolFormat(name="openai", read=read, marks=MARKS, is_taught_by=is_taught_by)
