"""Formats in which models think, by name. `auto` takes the first that the chat template teaches, in this order."""

from __future__ import annotations

from quire.renderer.output_parsing.format import ReasoningFormat
from quire.renderer.reasoning_parsers import (
    cohere,
    deepseek_r1,
    gemma4,
    granite,
    mistral,
    openai_gptoss,
    seed_oss,
    think,
)

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    module.FORMAT.name: module.FORMAT
    for module in (openai_gptoss, cohere, mistral, gemma4, seed_oss, granite, think, deepseek_r1)
}
