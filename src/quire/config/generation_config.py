"""What the option generation_config says: whether the authors' sampling parameters count, and which do not."""

from __future__ import annotations

import json
from dataclasses import replace

from quire.config.model_facts import ModelFacts
from quire.errors import OptionError, suggestion

AUTO = "auto"
NONE = "none"
# of generation_config.json, what a request may have as well, with the name that it has there
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def with_recommended(facts: ModelFacts, asked: str) -> ModelFacts:
    """`asked`: a word, or a JSON object whose values stand in place of the authors'."""
    if asked in (AUTO, NONE):
        return facts
    try:
        values = json.loads(asked)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise OptionError(
            f'generation_config={asked!r}: must be {AUTO}, {NONE} or a JSON object such as {{"temperature": 0.6}}.'
        )
    for name in values:
        if name not in NAMES:
            hint = suggestion(name, NAMES) or f" It may have {', '.join(NAMES)}."
            raise OptionError(f"generation_config: {name}: cannot be recommended.{hint}")
    return replace(facts, generation_config={**facts.generation_config, **values})
