"""Formats in which models call tools, by name. `auto` takes the first that the chat template teaches, in this order."""

from __future__ import annotations

from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.tool_parsers import (
    apertus,
    cohere,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    deepseek_v41,
    dots,
    functiongemma,
    gemma4,
    gigachat3,
    glm45,
    granite,
    granite_20b_fc,
    hermes,
    internlm,
    jamba,
    kimi_k2,
    lfm2,
    llama3_json,
    longcat,
    minicpm5,
    minimax_m2,
    mistral,
    olmo3,
    openai,
    phi4_mini_json,
    pythonic,
    qwen3_coder,
    seed_oss,
    step3,
    xlam,
)

# Templates with marks of their own come first: some of the others' marks occur in them as well.
_IN_ORDER = (
    openai, deepseek_v3, deepseek_v32, deepseek_v4, deepseek_v41, apertus, gigachat3, dots, minicpm5, kimi_k2,
    minimax_m2, step3, cohere, gemma4, functiongemma, internlm, seed_oss, longcat, lfm2, mistral, granite, qwen3_coder,
    glm45, hermes, jamba, olmo3, granite_20b_fc, phi4_mini_json, pythonic, llama3_json, xlam,
)  # fmt: skip
TOOL_FORMATS: dict[str, ToolFormat] = {module.FORMAT.name: module.FORMAT for module in _IN_ORDER}
