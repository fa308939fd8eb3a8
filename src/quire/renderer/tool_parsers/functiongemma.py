"""FunctionGemma: Gemma 4's format with marks of its own, `<start_function_call>call:name{key:<escape>text<escape>}`."""

from quire.renderer.tool_parsers.gemma4 import calls_with_bare_keys

FORMAT = calls_with_bare_keys("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
