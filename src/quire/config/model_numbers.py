"""The numbers of a model's config.json that the engine computes with, and what each may be.

A model comes from anywhere, and a number that no model has becomes gigabytes of tables, or an answer of NaN to every
request. So each is checked where the file is read; what a number means is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Range:
    least: float
    most: float
    is_whole: bool
    why: str


def _whole(least: int, most: int, why: str) -> _Range:
    return _Range(least, most, True, why)


def _real(least: float, most: float, why: str) -> _Range:
    return _Range(least, most, False, why)


_SIZE = _whole(1, 2**24, "a size of a layer")
_MIDDLE_SIZE = _whole(1, 2**26, "a size of a layer")
_RANK = _whole(0, 2**24, "a size of a part that may be absent")
# tables of rotary angles have a column for each, and a row for each position
_HEAD_SIZE = _whole(1, 2**13, "a size of a head")
_HEAD_PART = _whole(0, 2**13, "a size of a part of a head")
_STATE_SIZE = _whole(1, 2**16, "a size of a state")
_CONV_WIDTH = _whole(1, 2**10, "a number of tokens that a convolution sees")
_EVERY = _whole(1, 10_000, "a number of layers from one to the next of its kind")
_LAYERS = _whole(1, 10_000, "a number of layers")
_HEADS = _whole(1, 2**16, "a number of heads")
_EXPERTS = _whole(0, 2**16, "a number of experts")
# tables of positions have a row for each
_POSITIONS = _whole(1, 2**24, "a number of positions")
_WINDOW = _whole(0, 2**31, "a number of tokens")
_KINDS = _whole(0, 2**16, "a number of kinds")
_VOCABULARY = _whole(1, 2**24, "a number of tokens")
_EPSILON = _real(0.0, 1.0, "added to a variance")
_BASE = _real(1.0, 1e15, "the base of a power")
_FACTOR = _real(1e-6, 1e6, "a factor")
_SCALE = _real(-1e6, 1e6, "a factor")
_CAP = _real(1e-6, 1e9, "a bound of scores")

_RANGES: dict[str, _Range] = {
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "word_embed_proj_dim", "n_hidden"), _SIZE),
    **dict.fromkeys(("head_dim", "global_head_dim", "linear_key_head_dim", "linear_value_head_dim"), _HEAD_SIZE),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), _HEAD_PART),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), _RANK),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), _STATE_SIZE),
    **dict.fromkeys(("conv_kernel", "conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv"), _CONV_WIDTH),
    **dict.fromkeys(("n_groups", "num_heads", "linear_num_key_heads", "linear_num_value_heads"), _HEADS),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_n_groups"), _HEADS),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), _HEAD_SIZE),
    **dict.fromkeys(("expand", "mamba_expand"), _real(1e-3, 2**10, "a factor of a size")),
    "mamba_d_ssm": _MIDDLE_SIZE,
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "global_attn_every_n_layers"), _EVERY),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size"), _RANK),
    **dict.fromkeys(("num_labels", "type_vocab_size"), _KINDS),
    **dict.fromkeys(("full_attention_interval", "interleave_moe_layer_step"), _EVERY),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _RANK),
    **dict.fromkeys(
        ("intermediate_size", "intermediate_size_mlp", "ffn_dim", "n_inner", "ffn_hidden_size"), _MIDDLE_SIZE
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    "num_kv_shared_layers": _whole(0, 10_000, "a number of layers"),
    "num_global_key_value_heads": _HEADS,
    "hidden_size_per_layer_input": _RANK,
    "vocab_size_per_layer_input": _VOCABULARY,
    "top_k_experts": _EXPERTS,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_kv_heads"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), _EXPERTS),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), _EXPERTS),
    "block_multiple_of": _SIZE,
    "block_ffn_dim_multiplier": _FACTOR,
    "num_nextn_predict_layers": _whole(0, 1000, "a number of layers"),
    **dict.fromkeys(("decoder_sparse_step", "interleave_moe_layer_step", "no_rope_layer_interval"), _LAYERS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"), _POSITIONS),
    **dict.fromkeys(("max_sequence_length", "original_max_position_embeddings"), _POSITIONS),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), _whole(1, 2**16, "a number of positions")),
    "num_mel_bins": _whole(1, 2**12, "numbers of a spectrum"),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), _MIDDLE_SIZE),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    "d_kv": _HEAD_SIZE,
    "d_ff": _MIDDLE_SIZE,
    "num_decoder_layers": _LAYERS,
    # a bias has a number for each
    "relative_attention_max_distance": _whole(1, 2**16, "a number of tokens"),
    **dict.fromkeys(("sliding_window", "attention_window_size"), _WINDOW),
    "attention_chunk_size": _whole(1, 2**31, "a number of tokens"),
    "floor_scale": _real(1e-3, 1e9, "a number of positions"),
    "vocab_size": _VOCABULARY,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base"), _BASE),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _real(0.0, 1.0, "a share of a head")),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _FACTOR),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "attn_scale"), _SCALE),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logit_scale"), _SCALE),
    **dict.fromkeys(("query_pre_attn_scalar", "logits_scaling", "routed_scaling_factor"), _FACTOR),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _CAP),
    "swiglu_limit": _CAP,
}
_TOWER = "vision_config"
_RANGES_OF_TOWER = {
    **_RANGES,
    # may be a height and a width
    **dict.fromkeys(("image_size", "patch_size"), _whole(1, 2**12, "a side in pixels")),
    "depth": _LAYERS,
    "embed_dim": _SIZE,
    "mlp_ratio": _FACTOR,
    **dict.fromkeys(("num_channels", "in_channels", "in_chans"), _whole(1, 2**8, "a number of colours")),
    "out_hidden_size": _SIZE,
    **dict.fromkeys(("spatial_merge_size", "pooling_kernel_size"), _whole(1, 2**10, "a side in patches")),
    **dict.fromkeys(("spatial_patch_size", "window_size"), _whole(1, 2**12, "a side in pixels")),
    "temporal_patch_size": _whole(1, 2**10, "a number of frames"),
    "tokens_per_second": _real(0.0, 1000.0, "a number of positions"),
    **dict.fromkeys(("num_position_embeddings", "position_embedding_size"), _POSITIONS),
}
# They stand inside these too.
_INNER = ("text_config", _TOWER, "rope_parameters", "rope_scaling", "per_layer_config")
_MOST_DEPTH = 3
_MOST_SHOWN = 40


def check_numbers(config: Mapping[str, Any], file: object) -> None:
    """Raises ModelError for the first number that no model has. What is no number is left to whoever reads it."""
    for name, value, limits in _numbers_of(config):
        is_number = math.isfinite(value) if isinstance(value, float) else True
        is_kind = isinstance(value, int) or not limits.is_whole
        if is_number and is_kind and limits.least <= value <= limits.most:
            continue
        kind = "a number"
        bounds = f"{limits.least:g} to {limits.most:g}"
        if limits.is_whole:
            kind = "a whole number"
            bounds = f"{int(limits.least):,} to {int(limits.most):,}"
        shown = str(value)[:_MOST_SHOWN] if isinstance(value, float) or abs(value) < 10**30 else "a very large number"
        raise ModelError(
            f"{file}: {name}={shown} must be {kind} from {bounds}, because it is {limits.why}. Correct it, or download "
            "the file again."
        )


def _numbers_of(config: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Any, _Range]]:
    is_tower = path.startswith(_TOWER)
    for name, value in config.items():
        limits = (_RANGES_OF_TOWER if is_tower else _RANGES).get(name)
        for number in value if is_tower and isinstance(value, list) else [value]:
            if limits is not None and isinstance(number, int | float) and not isinstance(number, bool):
                yield f"{path}{name}", number, limits
        if limits is None and isinstance(value, dict) and depth < _MOST_DEPTH and (name in _INNER or path):
            yield from _numbers_of(value, f"{path}{name}.", depth + 1)
