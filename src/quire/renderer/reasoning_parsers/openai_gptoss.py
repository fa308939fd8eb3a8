"""gpt-oss: messages of the channel `analysis`. One reading finds them and the calls (`tool_parsers/openai.py`)."""

from __future__ import annotations

from quire.renderer.output_parsing.format import ReasoningFormat
from quire.renderer.output_parsing.reader import Reader, Steps
from quire.renderer.tool_parsers.openai import MARKS, is_taught_by, read


def _read(reader: Reader, is_open: bool) -> Steps[None]:
    yield from read(reader)


FORMAT = ReasoningFormat(name="openai_gptoss", read=_read, marks=MARKS, is_taught_by=is_taught_by)
