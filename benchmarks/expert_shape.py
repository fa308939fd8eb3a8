"""The shape of Qwen 3 with experts that benchmarks share: hidden 2,048, experts of 768, 8 of them for a token."""

from __future__ import annotations

from typing import Any

HIDDEN, INNER, TOP_K, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 2048, 768, 8, 32_000, 32, 4, 128


def config_of(num_layers: int, num_experts: int, *, is_dense: bool) -> dict[str, Any]:
    """`is_dense`: a model without experts, of as many weights as a token reads of the other."""
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": TOP_K * INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if is_dense:
        return {**config, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    own = {"num_experts": num_experts, "num_experts_per_tok": TOP_K, "moe_intermediate_size": INNER}
    return {
        **config, **own, "norm_topk_prob": True, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
    }  # fmt: skip
