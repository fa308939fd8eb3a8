"""LongCat: `<longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call>`."""

from quire.renderer.tool_parsers.json_in_tags import json_in_tags

FORMAT = json_in_tags("longcat", "<longcat_tool_call>", "</longcat_tool_call>")
