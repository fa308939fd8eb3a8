"""Mistral's Magistral: `[THINK]...[/THINK]` before the answer."""

from quire.renderer.reasoning_parsers.tags import between_tags

FORMAT = between_tags("mistral", "[THINK]", "[/THINK]")
