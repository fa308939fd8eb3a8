"""What can be combined: each feature by name, with what an engine and a request need for it.

A feature is of one of two kinds. What is *asked* (beams, a grammar, an adapter, the kind of model) is asked of the
plain run too; *how* it is computed (chunks, a cache, drafts, ranks) is what the plain run has none of.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Feature:
    """`options`: of the engine. `sign`: what of its statistics must have counted something, or the run shows nothing.
    `model`: one of `quire.testing.tiny_checkpoints`, or a kind of `source_checkpoints` or `image_checkpoints`."""

    name: str
    is_asked: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    sign: str = ""
    model: str = ""


CHUNKS = "chunks"
PREFIX_CACHE = "prefix cache"
STREAMED = "streamed prompts"
DRAFTS = "drafts"
BEAMS = "beams"
N = "n"
GRAMMAR = "grammar"
LORA = "LoRA"
LOGPROBS = "log-probabilities"
PROMPT_LOGPROBS = "prompt log-probabilities"
SWAP = "preemption by swap"
RECOMPUTE = "preemption by recomputation"
ASYNC = "asynchronous"
TP = "tensor parallel"
PP = "pipeline parallel"
WINDOWS = "windows"
STATES = "states"
SOURCES = "encoder and decoder"
IMAGES = "images"
QUANTISED_KV = "quantised KV"
SESSIONS = "sessions"
DISAGGREGATION = "disaggregation"
TIERS = "tiers"

IMAGE_MODEL = "qwen2_5_vl"
FEATURES = {
    feature.name: feature
    for feature in (
        Feature(CHUNKS, options={"max_num_batched_tokens": 12}),
        Feature(PREFIX_CACHE, options={"enable_prefix_caching": True}, sign="num_prefix_hit_tokens_total"),
        Feature(STREAMED),
        Feature(
            DRAFTS,
            options={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
            sign="num_draft_tokens_total",
        ),
        Feature(BEAMS, is_asked=True),
        Feature(N, is_asked=True),
        Feature(GRAMMAR, is_asked=True),
        Feature(LORA, is_asked=True, options={"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}),
        Feature(LOGPROBS, is_asked=True),
        Feature(PROMPT_LOGPROBS, is_asked=True),
        Feature(SWAP, options={"preemption_mode": "swap"}, sign="num_preemptions_by_swap_total"),
        Feature(RECOMPUTE, options={"preemption_mode": "recompute"}, sign="num_preemptions_by_recompute_total"),
        Feature(ASYNC, options={"async_scheduling": True}),
        Feature(TP, options={"tensor_parallel_size": 2}),
        Feature(PP, options={"pipeline_parallel_size": 2}),
        Feature(WINDOWS, is_asked=True, model="qwen2_window"),
        Feature(
            STATES,
            is_asked=True,
            options={"state_checkpoint_interval": 8, "state_checkpoint_share": 0.5},
            model="qwen3_5_text",
        ),
        Feature(SOURCES, is_asked=True, sign="num_images_encoded_total", model="t5"),
        Feature(IMAGES, is_asked=True, sign="num_images_encoded_total", model=IMAGE_MODEL),
        Feature(QUANTISED_KV, is_asked=True, options={"kv_cache_dtype": "int8"}),
        Feature(SESSIONS),
        Feature(
            DISAGGREGATION,
            options={"kv_connector": {"name": "tiered"}, "enable_prefix_caching": True},
            sign="fetched_tokens_total",
        ),
        Feature(
            TIERS,
            options={"kv_connector": {"name": "tiered"}, "enable_prefix_caching": True},
            sign="fetched_tokens_total",
        ),
    )
}
SCARCE = frozenset({SWAP, RECOMPUTE})
# one option, or one model, cannot have both values
ALTERNATIVES = (
    frozenset({SWAP, RECOMPUTE}),
    *(frozenset(pair) for pair in itertools.combinations((WINDOWS, STATES, SOURCES, IMAGES), 2)),
    frozenset({DISAGGREGATION, TIERS}),
)
