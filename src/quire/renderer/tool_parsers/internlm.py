"""InternLM 2.5: `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`."""

from __future__ import annotations

from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.json_text import read_call
from quire.renderer.output_parsing.reader import Reader, Steps

_ACTION, _PLUGIN, _CLOSE = "<|action_start|>", "<|plugin|>", "<|action_end|>"


def _call(reader: Reader) -> Steps[None]:
    yield from reader.expect(_PLUGIN)
    yield from read_call(reader)
    yield from reader.follows(_CLOSE)


FORMAT = ToolFormat(
    name="internlm",
    read=lambda reader: reader.attempts((_ACTION,), _call),
    # each is a token of its own
    marks=(_ACTION, _PLUGIN, _CLOSE),
    is_taught_by=lambda template: _PLUGIN in template,
)
