"""Phi 4 mini, as its authors prompt it: `functools[{"name": ..., "arguments": {...}}, ...]`."""

from quire.renderer.tool_parsers.json_in_tags import json_in_tags

FORMAT = json_in_tags("phi4_mini_json", "functools", taught="functools[")
