"""gpt-oss: experts with biases and a bounded gate, attention with sinks, every second layer with a window."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.layers import ClampedSwiGLU, Experts, QKVParallelLinear, RotaryEmbedding, Routing, make_parameter
from quire.worker.model_config import Nullable
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts, complete_heads
from quire.worker.models.qwen2 import window_of_layer

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")
_EXPERT = re.compile(r"(.*\.experts\.\d+)\.(gate_up_proj|down_proj)\.weight")


class GptOssAttention(LlamaAttention):
    """Each head has a sink: a logit of no token, which takes a share of the softmax and gives no value."""

    def __init__(self, config: Any, index: int, name: str, rotary: RotaryEmbedding) -> None:
        bias, window = config.attention_bias, window_of_layer(config, index)
        super().__init__(config, name, rotary, qkv_bias=bias, output_bias=bias, sliding_window=window)
        self.attn.sinks = make_sinks(self.qkv_proj)


def make_sinks(projection: QKVParallelLinear) -> nn.Parameter:
    """Those of a rank's heads."""
    group = projection.group
    return make_parameter(projection.num_heads, pick=lambda whole, tensor, part: (whole, group.slice_of(tensor, 0)))


def make_mlp(config: Any, index: int) -> nn.Module:
    return Experts(
        config.hidden_size,
        config.intermediate_size,
        config.num_local_experts,
        Routing(config.num_experts_per_tok),
        ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit),
        bias=True,
    )


def complete_config(config: Any) -> None:
    complete_heads(config)
    if config.layer_types is None:
        kinds = "sliding_attention", "full_attention"
        config.layer_types = [kinds[index % 2] for index in range(config.num_hidden_layers)]
    if config.rope_scaling is None and config.rope_parameters is None:
        config.rope_parameters = dict(_YARN)


def convert(name: str, weight: Any) -> list[tuple[str, Any]]:
    """The experts of a layer are one tensor, as floats [experts, inputs, outputs]; gate and up take turns in it.

    Weights that come quantised are one expert each, [outputs, inputs].
    """
    if found := _EXPERT.fullmatch(name):
        return _parts(found[1], found[2], "weight", weight)
    found = _EXPERTS.fullmatch(name)
    if found is None:
        return [(name, weight)]
    prefix, projection, is_bias = found.groups()
    leaf, turned = ("bias", weight) if is_bias else ("weight", weight.transpose(1, 2))
    return [
        part
        for expert, of_expert in enumerate(turned)
        for part in _parts(f"{prefix}.{expert}", projection, leaf, of_expert)
    ]


def _parts(expert: str, projection: str, leaf: str, weight: Any) -> list[tuple[str, Any]]:
    if projection == "down_proj":
        return [(f"{expert}.down_proj.{leaf}", weight)]
    rows = torch.arange(weight.shape[0], device="cpu")
    select: Callable[[Tensor], Any] = (
        (lambda index: weight.index_select(0, index)) if isinstance(weight, Tensor) else weight.select_rows
    )
    return [(f"{expert}.gate_proj.{leaf}", select(rows[::2])), (f"{expert}.up_proj.{leaf}", select(rows[1::2]))]


class GptOssForCausalLM(LlamaLike):
    architectures = ("GptOssForCausalLM",)
    parts = Parts(GptOssAttention, make_mlp)
    checkpoint_map = CheckpointMap(
        merged=MERGED,
        modules={"router": "gate", "sinks": "attn.sinks"},
        convert=convert,
        converts_quantized=True,
    )
    config_defaults = {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": Nullable(64),
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": None,
        "rope_parameters": None,
        "attention_bias": True,
        "sliding_window": Nullable(128),
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_config)


MODEL = GptOssForCausalLM
