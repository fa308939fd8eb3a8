"""Qwen 3.5 with experts, without its eyes: the layers of Qwen 3.5 and the experts of Qwen 3 Next."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.worker.models.checkpoint_map import CheckpointMap, split_experts
from quire.worker.models.llama import LlamaLike, Parts
from quire.worker.models.qwen2_moe import make_experts
from quire.worker.models.qwen3_5_text import Qwen35TextForCausalLM, make_mixer
from quire.worker.models.qwen3_next import DEFAULTS, complete_layers, make_norm, multi_token_of


def make_mlp(config: Any, index: int) -> nn.Module:
    return make_experts(config, is_normalised=True)


class Qwen35MoeTextForCausalLM(LlamaLike):
    multi_token = multi_token_of(make_mlp)
    architectures = ("Qwen3_5MoeForCausalLM",)
    parts = Parts(make_mixer, make_mlp, make_norm)
    checkpoint_map = CheckpointMap(
        modules=Qwen35TextForCausalLM.checkpoint_map.modules,
        ignored_modules=Qwen35TextForCausalLM.checkpoint_map.ignored_modules,
        merged=Qwen35TextForCausalLM.checkpoint_map.merged,
        convert=split_experts,
        converts_quantized=True,
    )
    config_defaults = {
        **DEFAULTS,
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    }
    complete_config = staticmethod(complete_layers)


MODEL = Qwen35MoeTextForCausalLM
