"""What cannot be had together, and what whoever asks for it is told."""

from __future__ import annotations

from tests.composition.features import (
    DISAGGREGATION,
    FEATURES,
    IMAGES,
    LORA,
    PP,
    PROMPT_LOGPROBS,
    SESSIONS,
    SOURCES,
    STATES,
    STREAMED,
    TIERS,
)

_STATES = (
    "kv_store: this model has recurrent layers, whose state is kept where a prompt ends and output goes on elsewhere, "
    "and nowhere else yet. Give a role (docs/disaggregation.md), or leave kv_store out."
)
_READ_WHOLE = (
    "prompt: an encoder reads the prompts of this model as a whole, so that nothing can follow one later: no sessions, "
    "no pinned prefixes, no prompts in pieces. Send each prompt whole, and by itself."
)
_PARTS = (
    "kv_store: of this model's sources and their texts each has blocks of its own, and no others, so that blocks that "
    "lie elsewhere would not be found. Leave kv_store, role and kv_connector out."
)
_KNOW_TOKENS = "media: not together with sessions, keep, continues or transfers of KV, which know tokens only."
_REFUSALS = {
    (STREAMED, PROMPT_LOGPROBS): "prompt_logprobs cannot be combined with a prompt that arrives in pieces: leave one "
    "of the two out.",
    (PROMPT_LOGPROBS, SESSIONS): "prompt_logprobs: not together with continues; what was kept is not computed again.",
    (LORA, DISAGGREGATION): "transfer: not together with an adapter, of which another engine knows nothing.",
    (STATES, TIERS): _STATES,
    (SOURCES, STREAMED): _READ_WHOLE,
    (SOURCES, SESSIONS): _READ_WHOLE,
    (SOURCES, PROMPT_LOGPROBS): "prompt_logprobs: an encoder reads the prompts of this model, whose tokens have no "
    "probability then. Leave it out; logprobs gives those of the output.",
    (
        SOURCES,
        LORA,
    ): "enable_lora: T5ForConditionalGeneration has an encoder, and adapters are built for decoders "
    "alone. Leave it out, or merge the adapter into the weights.",
    (SOURCES, PP): "pipeline_parallel_size=2: the layers of T5ForConditionalGeneration cannot be divided over so many "
    "stages: each looks at what its encoder made, which one worker has. Use tensor_parallel_size, or fewer stages.",
    (SOURCES, DISAGGREGATION): _PARTS,
    (SOURCES, TIERS): _PARTS,
    (IMAGES, STREAMED): "media: not in a prompt that arrives in pieces. Send it whole.",
    (IMAGES, SESSIONS): _KNOW_TOKENS,
    (IMAGES, DISAGGREGATION): _KNOW_TOKENS,
    (
        IMAGES,
        LORA,
    ): "media: not together with an adapter, which knows nothing of an encoder. Leave one of them out.",
}
REFUSALS = {frozenset(pair): text for pair, text in _REFUSALS.items()}
assert all(name in FEATURES for pair in REFUSALS for name in pair)


def refusals_among(names: frozenset[str]) -> list[str]:
    """Of features that are asked for together: one of these is what is said; none where they go together."""
    return [text for pair, text in REFUSALS.items() if pair <= names]
