"""Gemma 4: `<|channel>thought`, a line end, and what it thinks up to `<channel|>`."""

from dataclasses import replace

from quire.renderer.reasoning_parsers.tags import between_tags

_OPEN, _CLOSE = "<|channel>", "<channel|>"

# the name of the channel is text
FORMAT = replace(between_tags("gemma4", f"{_OPEN}thought\n", _CLOSE), marks=(_OPEN, _CLOSE))
