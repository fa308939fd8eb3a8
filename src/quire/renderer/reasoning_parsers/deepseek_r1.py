"""The same for models that begin inside a thought although neither they nor the prompt write `<think>`."""

from quire.renderer.reasoning_parsers.tags import between_tags

FORMAT = between_tags("deepseek_r1", "<think>", "</think>", is_always_open=True)
