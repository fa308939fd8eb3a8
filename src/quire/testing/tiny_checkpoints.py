"""Tiny checkpoints with random weights, made on the spot: every architecture without a download.

The directories are what a user has: config.json, model.safetensors, and a byte-level tokenizer with a chat template.
Weights are wide (standard deviation 0.25 instead of 0.02), so that the best token is far ahead of the second and
greedy comparisons do not hang on rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STD = 0.25
VOCAB_SIZE = 320
# 256 bytes, then these.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# of three quarters of a head
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
}  # fmt: skip
_LLAMA4_YARN = {**_YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOW = 24
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
_OPT = {"ffn_dim": 128, "word_embed_proj_dim": 64, "activation_function": "relu"}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

_MORE_EXPERTS = {
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip

_SHARED_EXPERT = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1],
    "shared_expert_intermediate_size": 48, "use_sliding_window": True, "sliding_window": _WINDOW,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
_GROUPED_LATENT = {**_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
_LATENT_YARN = {
    "rope_parameters": {**_YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 1.2, "beta_fast": 32, "beta_slow": 1},
}

_LLAMA4 = {
    "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4,
    "num_experts_per_tok": 1, "attention_chunk_size": _WINDOW, "no_rope_layers": [1, 0, 1], "floor_scale": 16,
    "attn_scale": 0.3,
}  # fmt: skip

_DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "head_dim": 32, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_NEXT_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip

_GRANITE = {
    "intermediate_size": 32, "shared_intermediate_size": 48, "mamba_n_heads": 8, "mamba_n_groups": 2,
    "mamba_d_state": 24, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0,
}  # fmt: skip

_MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24}
_FALCON_H1 = {
    **_MAMBA2, "mamba_d_head": 12, "mamba_d_ssm": 96, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.8, 1.2], "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6, "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.4, "key_multiplier": 0.7,
    "mamba_rms_norm": False,
}  # fmt: skip
_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
}  # fmt: skip

# 3 of 5 layers keep keys and values: 2 with a window, and 1 without, which keeps twice as much of a token
_GEMMA4 = {
    "num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", *_ALTERNATING[:2] * 2],
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE, "final_logit_softcapping": 30.0,
}  # fmt: skip
# a layer with a window keeps twice as much as one of the three without
_GEMMA4_EXPERTS = {
    "num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 32,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": _WINDOW,
    "layer_types": [*_ALTERNATING[:2]] * 3, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "attention_bias": True,
}  # fmt: skip
_GEMMA3 = {"head_dim": 16, "sliding_window": _WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 24}

# layers with a window have twice as many heads of keys
_MIMO = {
    "head_dim": 32, "v_head_dim": 16, "sliding_window": _WINDOW, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "layer_types": ["full_attention", *_ALTERNATING[:2]],
}  # fmt: skip

# name -> (model_type, what differs from _SIZES). Several names may share a model_type.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama_rope_llama3": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_rope_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama_rope_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama_rope_yarn": ("llama", {"rope_parameters": _YARN_ROPE}),
    "mistral": ("mistral", {"sliding_window": _WINDOW}),
    "mistral_full": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "opt": ("opt", _OPT),
    "opt_post_norm": ("opt", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "gpt2": ("gpt2", _GPT2),
    "gpt2_inverse_layer": ("gpt2", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    # through the Transformers library
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": _WINDOW, "query_pre_attn_scalar": 16}),
    "granite": ("granite", {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.7}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", _EXPERTS),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, "head_dim": 16, "sliding_window": _WINDOW, "layer_types": _ALTERNATING}),
    "cohere": ("cohere", {}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {"sliding_window": _WINDOW}),
    "gpt_neox": ("gpt_neox", {}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "qwen2_moe": ("qwen2_moe", _SHARED_EXPERT),
    "gemma3": ("gemma3_text", _GEMMA3),
    "gemma3_cap": ("gemma3_text", {**_GEMMA3, "final_logit_softcapping": 4.0, "tie_word_embeddings": False}),
    # hybrids: recurrent layers beside attention
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3_next": ("qwen3_next", {**_DELTA_NET, **_NEXT_EXPERTS}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2}),
    "qwen3_5_text": ("qwen3_5_text", _DELTA_NET),
    "granitemoehybrid": ("granitemoehybrid", {**_GRANITE, **_EXPERTS}),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        {**_GRANITE, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True},
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**_DELTA_NET, **_NEXT_EXPERTS}),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
    "bamba": ("bamba", {**_MAMBA2, "mamba_d_head": 16, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", _FALCON_H1),
    "falcon_h1_norm": ("falcon_h1", {**_FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "nemotron_h": ("nemotron_h", _NEMOTRON_H),
    "minimax": (
        "minimax",
        {
            **_EXPERTS,
            "head_dim": 16,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "block_size": 16,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.8,
            "full_attn_alpha_factor": 1.1,
            "mlp_beta_factor": 0.9,
        },
    ),
    "mamba": ("mamba", {"state_size": 12}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 12, "use_bias": True}),
    "jamba": (
        "jamba",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 12,
        },
    ),
    # positions as slopes of attention, and branches side by side
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "bloom_norm": (
        "bloom",
        {"n_layer": 2, "n_head": 6, "hidden_size": 48, "apply_residual_connection_post_layernorm": True},
    ),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
    "falcon": ("falcon", {"ffn_hidden_size": 128}),
    "falcon_alibi": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon_new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_new_norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo3": ("olmo3", {"sliding_window": _WINDOW, "layer_types": _ALTERNATING}),
    "olmo3_yarn": (
        "olmo3",
        {
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "rope_parameters": {
                "full_attention": _YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3_long": (
        "phi3",
        {"sliding_window": _WINDOW, "original_max_position_embeddings": 32, "rope_parameters": _LONGROPE},
    ),
    "ministral3": ("ministral3", {"rope_parameters": _LLAMA4_YARN}),
    "ministral3_window": ("ministral3", {"sliding_window": _WINDOW, "head_dim": 16}),
    "phi": ("phi", {}),
    "phi_norm": ("phi", {"qk_layernorm": True, "tie_word_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "deepseek_v3_groups": ("deepseek_v3", {**_GROUPED_LATENT, **_LATENT_YARN}),
    "deepseek_v3_halves": ("deepseek_v3", {**_LATENT, "q_lora_rank": None, "rope_interleave": False}),
    "deepseek_v3_bias": ("deepseek_v3", {**_LATENT, "attention_bias": True, "n_shared_experts": 2}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v2_groups": (
        "deepseek_v2",
        {**_GROUPED_LATENT, **_LATENT_YARN, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    ),
    "llama4": ("llama4_text", _LLAMA4),
    "llama4_chunks": ("llama4_text", {**_LLAMA4, "no_rope_layers": [1, 1, 1]}),
    "llama4_dense": (
        "llama4_text",
        {
            **_LLAMA4,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    # layers of two shapes
    "mimo_v2_flash": ("mimo_v2_flash", _MIMO),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4_moe": ("gemma4_text", _GEMMA4_EXPERTS),
    # more that run through Transformers
    **{name: (name, {}) for name in ("olmo", "ernie4_5", "nemotron", "apertus", "arcee", "persimmon", "bitnet")},
    **{
        name: (name, {"head_dim": 16})
        for name in ("seed_oss", "glm", "glm4", "hunyuan_v1_dense", "helium", "vaultgemma")
    },
    **{name: (name, {"sliding_window": _WINDOW, "layer_types": _ALTERNATING}) for name in ("cohere2", "exaone4")},
    "ministral": ("ministral", {"sliding_window": _WINDOW, "layer_types": _ALTERNATING, "head_dim": 16}),
    **{name: (name, {**_MORE_EXPERTS, "head_dim": 16}) for name in ("glm4_moe", "minimax_m2", "hy_v3", "solar_open")},
    "glm4_moe_norm": (
        "glm4_moe",
        {**_MORE_EXPERTS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "n_group": 2},
    ),
    **{name: (name, {**_MORE_EXPERTS, "head_dim": 16}) for name in ("exaone_moe", "afmoe")},
    **{name: (name, _EXPERTS) for name in ("granitemoe", "phimoe")},
    **{name: (name, {"num_experts": 4, "num_experts_per_tok": 2}) for name in ("olmoe", "flex_olmo")},
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    ),
    "gpt_bigcode": ("gpt_bigcode", _GPT2),
    **{name: (name, {**_GPT2, "rotary_dim": 8, "n_inner": 128}) for name in ("codegen", "gptj")},
    # refused, each for a reason of its own
    **{
        name: (name, {})
        for name in ("diffllama", "doge", "gpt_neox_japanese", "kimi_linear", "olmo_hybrid", "recurrent_gemma", "xglm")
    },
    "bert": ("bert", {"pad_token_id": 0}),
    "bart": ("bart", {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}),
}


def make_checkpoint(
    path: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """A checkpoint directory for one of ARCHITECTURES, with a tokenizer; returns its path."""
    model = make_model(name, seed=seed, dtype=dtype, **changes)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def make_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The Transformers model itself, with wide random weights."""
    from transformers import AutoModelForCausalLM

    # some of what a model begins with is drawn, and `widen` does not draw it again
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(name, **changes), dtype=dtype)
    widen(model, seed)
    return model.eval()


def make_config(name: str, **changes: Any) -> Any:
    """The Transformers configuration of one of ARCHITECTURES."""
    from transformers import AutoConfig

    model_type, differences = ARCHITECTURES[name]
    return AutoConfig.for_model(model_type, **{**_SIZES, **differences, **changes})


def widen(model: Any, seed: int) -> None:
    """Random weights, wide enough that the best token is far ahead of the second."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _STD
            # Norms stay near what they were (one, or zero where one is added to them).
            is_vector = parameter.ndim == 1
            parameter.copy_(parameter.float() + noise * 0.5 if is_vector else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # a weight, though nothing is learned in it
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * _STD)
            if name.endswith("layer_scalar"):  # so it is here
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)


def write_tokenizer(
    path: Path, *, chat_template: str | None = CHAT_TEMPLATE, more_special: tuple[str, ...] = ()
) -> None:
    """A tokenizer whose tokens are bytes: any text, any language, no training."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(_byte_tokens())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL_TOKENS, *more_special)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0], bos_token=SPECIAL_TOKENS[0])
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(path)


def _byte_tokens() -> list[str]:
    """The letter that byte-level BPE writes for each byte, in the order of bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def shape_0_6b_config(path: Path, **changes: Any) -> Path:
    """config.json alone, with the shape of Qwen3-0.6B: for load_format=dummy."""
    return _write_config(path, {**_SHAPE_0_6B, **changes})


_SHAPE_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "eos_token_id": 151_645,
    "bos_token_id": 151_643,
    "torch_dtype": "bfloat16",
}


def _write_config(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return path


# For tests that build a whole directory once and share it.
CheckpointMaker = Callable[..., Path]
