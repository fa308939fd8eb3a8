"""Seed-OSS: Qwen 3 Coder's format between marks of its own, `<seed:tool_call><function=name>...</seed:tool_call>`."""

from quire.renderer.tool_parsers.qwen3_coder import calls_as_functions

FORMAT = calls_as_functions("seed_oss", "<seed:tool_call>", "</seed:tool_call>")
