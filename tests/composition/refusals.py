"""What cannot be had together, and what whoever asks for it is told."""

from __future__ import annotations

from tests.composition.features import (
    DISAGGREGATION,
    FEATURES,
    LORA,
    PROMPT_LOGPROBS,
    SESSIONS,
    STATES,
    STREAMED,
    TIERS,
)

_STATES = (
    "kv_store: this model has recurrent layers, whose state is kept where a prompt ends and output goes on elsewhere, "
    "and nowhere else yet. Give a role (docs/disaggregation.md), or leave kv_store out."
)
_REFUSALS = {
    (STREAMED, PROMPT_LOGPROBS): "prompt_logprobs cannot be combined with a prompt that arrives in pieces: leave one "
    "of the two out.",
    (PROMPT_LOGPROBS, SESSIONS): "prompt_logprobs: not together with continues; what was kept is not computed again.",
    (LORA, DISAGGREGATION): "transfer: not together with an adapter, of which another engine knows nothing.",
    (STATES, TIERS): _STATES,
}
REFUSALS = {frozenset(pair): text for pair, text in _REFUSALS.items()}
assert all(name in FEATURES for pair in REFUSALS for name in pair)


def refusals_among(names: frozenset[str]) -> list[str]:
    """Of features that are asked for together: one of these is what is said; none where they go together."""
    return [text for pair, text in REFUSALS.items() if pair <= names]
