"""Seed-OSS: `<seed:think>...</seed:think>` before the answer."""

from quire.renderer.reasoning_parsers.tags import between_tags

FORMAT = between_tags("seed_oss", "<seed:think>", "</seed:think>")
