"""Where the tensors of a plain checkpoint go in a GGUF file, and what the file's metadata say of their model.

An entry is a tensor of the file as views of tensors of the checkpoint: what they are stored as can be written back
through them, and then the checkpoint is what the file stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# general.architecture and rows of queries and keys in pairs, by model_type
ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), ("llama", True)),
    "qwen2": ("qwen2", False), "qwen3": ("qwen3", False), "qwen2_moe": ("qwen2moe", False),
    "qwen3_moe": ("qwen3moe", False), "gpt_oss": ("gpt-oss", False), "deepseek_v2": ("deepseek2", False),
    "deepseek_v3": ("deepseek2", False),
}  # fmt: skip
_NAMES = (
    ("model.embed_tokens.", "token_embd."), ("model.norm.", "output_norm."), ("lm_head.", "output."),
    ("model.layers.", "blk."), ("block_sparse_moe.", "mlp."), ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"), ("self_attn.sinks", "attn_sinks.weight"),
    ("self_attn.q_a_proj", "attn_q_a"), ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"), ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"), ("self_attn.kv_b_proj", "attn_kv_b"),
    ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"), ("mlp.router.", "ffn_gate_inp."),
    ("mlp.gate.", "ffn_gate_inp."), ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_experts.", "mlp.shared_expert."), ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"), ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"),
)  # fmt: skip
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_INTERLEAVED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias)?")
_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


@dataclass
class Entry:
    """A tensor of the file: one view, or several that are stacked."""

    name: str
    views: list[Tensor]
    is_stacked: bool = False

    @property
    def value(self) -> Tensor:
        return torch.stack(self.views) if self.is_stacked else self.views[0]

    @property
    def is_float(self) -> bool:
        """What is never quantised, whatever type is asked for."""
        return self.value.ndim == 1 or self.name.endswith((".bias", *_ROUTERS))

    def write_back(self, meaning: Tensor) -> None:
        for view, part in zip(self.views, meaning if self.is_stacked else [meaning], strict=True):
            view.copy_(part)


def entries(tensors: dict[str, Tensor], config: dict[str, Any], layout: str) -> Iterator[Entry]:
    """`layout`: "stacked" as files are today; "merged" where gate and up are one tensor; "alone" and "whole kv_b" as
    the oldest files have experts and latent attention."""
    experts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            layer, number, projection = match[1], match[2], _PROJECTIONS[match[3]]
            if layout == "alone":
                yield Entry(f"blk.{layer}.ffn_{projection}.{number}.weight", [tensor])
            else:
                experts.setdefault((layer, projection), {})[int(number)] = tensor
        elif match := _INTERLEAVED.fullmatch(name):
            yield from _interleaved(tensor, match[1], match[2], is_bias=match[3] is not None)
        elif name.endswith("kv_b_proj.weight") and layout != "whole kv_b":
            yield from _by_direction(tensor, name.split(".")[2], config)
        else:
            yield Entry(_renamed(name, config), [tensor.squeeze(0) if "shared_expert_gate" in name else tensor])
    for (layer, projection), by_number in experts.items():
        if layout != "merged" or projection == "down":
            yield Entry(f"blk.{layer}.ffn_{projection}_exps.weight", _in_order(by_number), is_stacked=True)
        elif projection == "gate":
            both = zip(_in_order(by_number), _in_order(experts[layer, "up"]), strict=True)
            # a copy: what it stands for is not written back, so that it must be stored exactly
            merged = [torch.cat(pair) for pair in both]
            yield Entry(f"blk.{layer}.ffn_gate_up_exps.weight", merged, is_stacked=True)


def _in_order(by_number: dict[int, Tensor]) -> list[Tensor]:
    return [by_number[number] for number in sorted(by_number)]


def _interleaved(tensor: Tensor, layer: str, projection: str, *, is_bias: bool) -> Iterator[Entry]:
    """gpt-oss: gate and up take turns along the outputs, which come last."""
    rows, leaf = (tensor, "bias") if is_bias else (tensor.transpose(1, 2), "weight")
    parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if projection == "gate_up_proj" else {"down": rows}
    for part, view in parts.items():
        yield Entry(f"blk.{layer}.ffn_{part}_exps.{leaf}", list(view), is_stacked=True)


def _by_direction(tensor: Tensor, layer: str, config: dict[str, Any]) -> Iterator[Entry]:
    """Latent attention as it is computed: keys turned."""
    key_dim, value_dim = config["qk_nope_head_dim"], config["v_head_dim"]
    by_head = tensor.view(-1, key_dim + value_dim, tensor.shape[1])
    yield Entry(f"blk.{layer}.attn_k_b.weight", list(by_head[:, :key_dim].transpose(1, 2)), is_stacked=True)
    yield Entry(f"blk.{layer}.attn_v_b.weight", list(by_head[:, key_dim:]), is_stacked=True)


def _renamed(name: str, config: dict[str, Any]) -> str:
    for old, new in _NAMES:
        name = name.replace(old, new)
    return name.replace("ffn_norm", "post_attention_norm") if config["model_type"] == "gpt_oss" else name


def metadata(config: dict[str, Any], layout: str) -> dict[str, Any]:
    architecture, _ = ARCHITECTURES[config["model_type"]]
    values = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        **_rope(config),
        **_experts(config),
    }
    if config["model_type"].startswith("deepseek"):
        values |= _latent(config, is_whole=layout == "whole kv_b")
    elif config.get("head_dim"):
        values |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if config["model_type"] in ("mistral", "gpt_oss") and config.get("sliding_window"):
        values["attention.sliding_window"] = config["sliding_window"]
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    values: dict[str, Any] = {"rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))}
    if rope.get("rope_type") != "yarn":
        return values
    values |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if name in rope:
            values[f"rope.scaling.{key}"] = float(rope[name])
    if rope.get("mscale_all_dim"):
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return values


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((config[name] for name in names if config.get(name)), 0)
    if not count:
        return {}
    values: dict[str, Any] = {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    if config["model_type"] != "mixtral":
        values["expert_feed_forward_length"] = config.get("moe_intermediate_size") or config["intermediate_size"]
    if config.get("shared_expert_intermediate_size"):
        values["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return values


def _latent(config: dict[str, Any], *, is_whole: bool) -> dict[str, Any]:
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key_dim, value_dim = config["qk_nope_head_dim"] + rotary, config["v_head_dim"]
    values = {
        "attention.kv_lora_rank": latent,
        "rope.dimension_count": rotary,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config.get("norm_topk_prob")),
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }
    if config["q_lora_rank"]:
        values["attention.q_lora_rank"] = config["q_lora_rank"]
    if is_whole:
        return values | {"attention.key_length": key_dim, "attention.value_length": value_dim}
    return values | {
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rotary,
        "attention.value_length": latent,
        "attention.key_length_mla": key_dim,
        "attention.value_length_mla": value_dim,
    }
