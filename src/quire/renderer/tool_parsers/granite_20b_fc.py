"""Granite 20B for functions: `<function_call> {"name": ..., "arguments": {...}}` for each call."""

from quire.renderer.tool_parsers.json_in_tags import json_in_tags

FORMAT = json_in_tags("granite-20b-fc", "<function_call>")
