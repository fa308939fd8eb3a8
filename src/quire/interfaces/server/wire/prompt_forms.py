"""The four forms in which OpenAI's API takes prompts: a text, texts, the tokens of one, the tokens of several."""

from __future__ import annotations

from typing import Any

from quire.interfaces.server.wire.errors import invalid


def split_prompts(given: str | list[Any], name: str, most: int) -> list[str] | list[list[int]]:
    """As a list of texts or of token lists, at most so many; `name` is the field for messages."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(f"{name}: must not be an empty list.", name)
    if all(_is_token(part) for part in given):
        return [given]
    if len(given) > most:
        raise invalid(f"{name}: {len(given)} {name}s, at most {most} are allowed.", name)
    if all(isinstance(part, str) for part in given):
        return given
    if all(isinstance(part, list) and part and all(_is_token(token) for token in part) for part in given):
        return given
    raise invalid(f"{name}: must be a text, a list of texts, a list of token ids or a list of such lists.", name)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
