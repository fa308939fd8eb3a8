"""GLM 4.5 and 4.6: attention of Llama or Qwen 3, and DeepSeek V3's experts behind the first layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.worker.layers import RMSNorm, RotaryEmbedding
from quire.worker.model_config import Nullable
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.deepseek_v3 import drafting_layers, make_mlp, next_layer
from quire.worker.models.llama import LlamaAttention, LlamaLike, Parts


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    norm = partial(RMSNorm, eps=config.rms_norm_eps) if config.use_qk_norm else None
    return LlamaAttention(config, name, rotary, qkv_bias=config.attention_bias, make_head_norm=norm)


class Glm4MoeForCausalLM(LlamaLike):
    architectures = ("Glm4MoeForCausalLM",)
    parts = Parts(make_attention, make_mlp)
    multi_token = next_layer(make_attention)
    # as Transformers writes them since its fifth version
    config_names = {"num_mtp_layers": "num_nextn_predict_layers", "num_local_experts": "n_routed_experts"}
    config_defaults = {
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": Nullable(8),
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": Nullable(1),
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
    }

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.checkpoint_map = CheckpointMap(
            merged=MERGED, modules={"shared_experts": "shared_expert"}, ignored_modules=drafting_layers(config)
        )


MODEL = Glm4MoeForCausalLM
