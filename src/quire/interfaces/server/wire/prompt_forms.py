"""The four forms in which OpenAI's API takes prompts: a text, texts, the tokens of one, the tokens of several."""

from __future__ import annotations

from typing import Any

from quire.interfaces.server.wire.errors import invalid


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises ApiError for an id outside the vocabulary."""
    # twice as fast as to look at one after the other, and there may be a million
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            text = f"{param}: token id {str(token_id)[:40]} is out of vocabulary (0 to {vocab_size - 1})."
            raise invalid(text, param)


def split_prompts(given: str | list[Any], name: str, most: int) -> list[str | list[int]]:
    """As a list of texts or of token lists, at most so many; `name` is the field for messages."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(f"{name}: must not be an empty list.", name)
    if _is_tokens(given):
        return [given]
    if len(given) > most:
        raise invalid(f"{name}: {len(given)} {name}s, at most {most} are allowed.", name)
    if all(isinstance(part, str) for part in given):
        return given
    if all(_is_tokens(part) for part in given):
        return given
    for index, part in enumerate(given):
        if not (type(part) in (str, int) or _is_tokens(part)):
            where = f"{name}[{index}]"
            raise invalid(f"{where}: must be a text, a token id or a list of token ids that is not empty.", where)
    raise invalid(f"{name}: must be a text, a list of texts, a list of token ids or a list of such lists.", name)


def names_of(given: str | list[Any], prompts: list[str | list[int]], name: str) -> list[str]:
    """What errors call each of the prompts that `split_prompts` has found: in a list of them by its number."""
    if prompts is not given:
        return [name]
    return [f"{name}[{index}]" for index in range(len(prompts))]


def _is_tokens(value: Any) -> bool:
    """As JSON gives them: true and false are no numbers. There may be a million."""
    return isinstance(value, list) and set(map(type, value)) == {int}
