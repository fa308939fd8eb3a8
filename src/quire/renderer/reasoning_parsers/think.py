"""Qwen 3, QwQ, DeepSeek R1 and many others: `<think>...</think>` before the answer."""

from quire.renderer.reasoning_parsers.tags import between_tags

FORMAT = between_tags("think", "<think>", "</think>")
