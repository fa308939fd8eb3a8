"""Jamba, and Hunyuan A13B: `<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>`."""

from quire.renderer.tool_parsers.json_in_tags import json_in_tags

FORMAT = json_in_tags("jamba", "<tool_calls>", "</tool_calls>")
