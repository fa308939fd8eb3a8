"""Dots: `<dots_function_call><invoke name="f"><parameter name="key">value</parameter></invoke>...`."""

from quire.renderer.tool_parsers.invoke import calls_in_tags

FORMAT = calls_in_tags("dots", "dots_function_call", "", on_own_lines=True)
