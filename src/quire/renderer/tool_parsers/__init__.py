"""Formats in which models call tools, by name. `auto` takes the first that the chat template teaches, in this order."""

from __future__ import annotations

from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.tool_parsers import deepseek_v3, hermes, llama3_json, mistral, openai, pythonic, qwen3_coder

# Templates with marks of their own come first: some of the others' marks occur in them as well.
TOOL_FORMATS: dict[str, ToolFormat] = {
    module.FORMAT.name: module.FORMAT
    for module in (openai, deepseek_v3, mistral, qwen3_coder, hermes, pythonic, llama3_json)
}
