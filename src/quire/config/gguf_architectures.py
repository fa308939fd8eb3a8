"""Architectures that are read from GGUF files, and what each of them says beyond the common settings.

    llama qwen2 qwen3            dense; Mistral and Mixtral call themselves llama
    qwen2moe qwen3moe gpt-oss    mixtures of experts
    deepseek2                    DeepSeek V2 and V3: latent attention, experts, shared experts, dense layers first

Owns what the writers of such files leave out because every model of an architecture has it. Called by `gguf_config.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.config.gguf_values import GGUFValues
from quire.errors import ModelError

Settings: TypeAlias = dict[str, Any]
# key -> the values that it may have
Allowed: TypeAlias = dict[str, tuple[Any, ...]]
# expert_gating_func
_SOFTMAX = 1
_SIGMOID = 2
# The multiplier of YaRN's logarithm is stored times this.
_LOG_MULTIPLIER = 0.1
# Settings of experts that change what a model computes; without a place in config.json a file may only say "no".
_OF_EXPERTS: Allowed = {
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, _SOFTMAX),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
}


@dataclass(frozen=True)
class Architecture:
    """model_type, class as in config.json, and its own settings by a file's values and the common settings."""

    model_type: str
    class_name: str
    settings: Callable[[GGUFValues, Settings], Settings]


def find_architecture(name: str, values: GGUFValues) -> Architecture:
    """Of a name that is among ARCHITECTURES."""
    if name == "llama" and values.count("expert_count"):
        return _MIXTRAL
    if name == "llama" and values.count("attention.sliding_window"):
        # Mistral's models are Llama's to the writers of GGUF, but for the window.
        return _MISTRAL
    if name == "deepseek2" and values.count("expert_gating_func") == _SIGMOID:
        return _DEEPSEEK_V3
    return ARCHITECTURES[name]


def _dense(values: GGUFValues, config: Settings) -> Settings:
    _check_plain(values, config, {"expert_count": (0,), "expert_used_count": (0,)})
    return {}


def _dense_with_biases(values: GGUFValues, config: Settings) -> Settings:
    return {**_dense(values, config), "attention_bias": "blk.0.attn_q.bias" in values.file.tensors}


def _mixtral(values: GGUFValues, config: Settings) -> Settings:
    _check_plain(values, config, _OF_EXPERTS)
    return {
        "num_local_experts": values.whole("expert_count"),
        "num_experts_per_tok": values.whole("expert_used_count"),
    }


def _qwen_moe(is_normalised: bool) -> Callable[[GGUFValues, Settings], Settings]:
    """`is_normalised`: whether the weights of a token's experts sum to one, where a file does not say it."""

    def settings(values: GGUFValues, config: Settings) -> Settings:
        _check_plain(values, config, _OF_EXPERTS)
        top_k = values.whole("expert_used_count")
        dense_size = config["intermediate_size"]
        own = {
            "num_experts": values.whole("expert_count"),
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": values.whole("expert_feed_forward_length", max(1, dense_size // top_k)),
            "norm_topk_prob": bool(values.optional("expert_weights_norm", is_normalised)),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        if not is_normalised:  # Qwen 2's shared expert
            own["shared_expert_intermediate_size"] = values.whole("expert_shared_feed_forward_length", dense_size)
        return own

    return settings


def _gpt_oss(values: GGUFValues, config: Settings) -> Settings:
    """Its frequencies are not rounded where YaRN begins and ends to stretch them, which a file has no word for."""
    _check_plain(values, config, _OF_EXPERTS)
    num_layers = config["num_hidden_layers"]
    pattern = values.optional("attention.sliding_window_pattern", 2)
    if isinstance(pattern, list):
        has_window = [bool(value) for value in pattern[:num_layers]]
    else:
        period = values.whole("attention.sliding_window_pattern", 2)
        has_window = [(index + 1) % period != 0 for index in range(num_layers)]
    if len(has_window) != num_layers:
        raise ModelError(
            f"{values.file.path}: {values.name('attention.sliding_window_pattern')} has {len(has_window)} layers, "
            f"the model {num_layers}. Convert the model again."
        )
    return {
        "num_local_experts": values.whole("expert_count"),
        "num_experts_per_tok": values.whole("expert_used_count"),
        "intermediate_size": values.whole("expert_feed_forward_length", config["intermediate_size"]),
        "attention_bias": True,
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in has_window],
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


def _latent(values: GGUFValues, config: Settings) -> Settings:
    """Lengths of a head are those of its keys and values once they are made, which newer files keep apart."""
    kv_lora_rank = values.whole("attention.kv_lora_rank")
    rotary_dim = values.whole("rope.dimension_count")
    is_split = values.has("attention.key_length_mla")
    key_length = values.whole(f"attention.key_length{'_mla' if is_split else ''}")
    if key_length <= rotary_dim:
        raise ModelError(
            f"{values.file.path}: keys of {key_length} numbers, {rotary_dim} of them rotary, have no others. "
            "Convert the model again."
        )
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    if rope["rope_type"] == "yarn" and values.optional("rope.scaling.yarn_log_multiplier", 0.0):
        # one number for what config.json has two of, which agree in every published model
        rope["mscale"] = values.number("rope.scaling.yarn_log_multiplier") / _LOG_MULTIPLIER
        rope["mscale_all_dim"] = rope["mscale"]
    return {
        # heads share the latent vector, and files count that as one
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotary_dim,
        "kv_lora_rank": kv_lora_rank,
        "q_lora_rank": values.count("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": key_length - rotary_dim,
        "v_head_dim": values.whole(f"attention.value_length{'_mla' if is_split else ''}"),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in values.file.tensors,
        "rope_parameters": rope,
    }


def _deepseek(values: GGUFValues, config: Settings) -> Settings:
    is_sigmoid = values.count("expert_gating_func") == _SIGMOID
    if not is_sigmoid:
        _refuse(values, {"expert_gating_func": (0, _SOFTMAX)})
    num_drafting = values.count("nextn_predict_layers")
    if num_drafting >= config["num_hidden_layers"]:
        raise ModelError(
            f"{values.file.path}: {values.name('nextn_predict_layers')}={num_drafting} of "
            f"{config['num_hidden_layers']} layers leaves none. Convert the model again."
        )
    has_groups = values.count("expert_group_count") > 1
    greedy = "group_limited_greedy" if has_groups else "greedy"
    return {
        **_latent(values, config),
        "num_hidden_layers": config["num_hidden_layers"] - num_drafting,
        "num_nextn_predict_layers": num_drafting,
        "n_routed_experts": values.whole("expert_count"),
        "num_experts_per_tok": values.whole("expert_used_count"),
        "moe_intermediate_size": values.whole("expert_feed_forward_length"),
        "n_shared_experts": values.count("expert_shared_count") or None,
        "first_k_dense_replace": values.count("leading_dense_block_count"),
        "n_group": values.whole("expert_group_count") if has_groups else 1,
        "topk_group": values.whole("expert_group_used_count") if has_groups else 1,
        "topk_method": "noaux_tc" if is_sigmoid else greedy,
        "scoring_func": "sigmoid" if is_sigmoid else "softmax",
        "norm_topk_prob": bool(values.optional("expert_weights_norm", False)),
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0),
    }


def _check_plain(values: GGUFValues, config: Settings, allowed: Allowed) -> None:
    """Of attention that keeps the keys and values of each head; `allowed` is of the rest."""
    if values.whole("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise ModelError(
            f"{values.file.path}: keys and values of different lengths are not supported for GGUF files yet."
        )
    _refuse(values, {"rope.scaling.yarn_log_multiplier": (0.0,), **allowed})


def _refuse(values: GGUFValues, allowed: Allowed) -> None:
    for key, harmless in allowed.items():
        value = values.optional(key, harmless[0])
        if value not in harmless:
            raise ModelError(f"{values.file.path}: {values.name(key)}={value} is not supported for GGUF files yet.")


_MISTRAL = Architecture("mistral", "MistralForCausalLM", _dense)
_MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _mixtral)
_DEEPSEEK_V3 = Architecture("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek)
# general.architecture
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _dense_with_biases),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _dense),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _dense_with_biases),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen_moe(is_normalised=False)),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen_moe(is_normalised=True)),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss),
    "deepseek2": Architecture("deepseek_v2", "DeepseekV2ForCausalLM", _deepseek),
}
