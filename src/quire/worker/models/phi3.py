"""Phi 3 and 4: Llama, with query, key and value in one tensor of the checkpoint, gate and up in another, and angles for
long sequences."""

from __future__ import annotations

from typing import Any

from quire.worker.layers.rotary import rope_parameters
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap, split_rows
from quire.worker.models.llama import LlamaLike, Parts, complete_kv_heads
from quire.worker.models.mistral import make_attention


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    config.rope_parameters = rope_parameters(config)
    config.rope_scaling = None
    # what longrope was called before it had its name
    if config.rope_parameters["rope_type"] in ("su", "yarn"):
        config.rope_parameters["rope_type"] = "longrope"


class Phi3ForCausalLM(LlamaLike):
    architectures = ("Phi3ForCausalLM",)
    parts = Parts(make_attention)
    config_defaults = {
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        modules = {
            "qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
        }
        self.checkpoint_map = CheckpointMap(merged=MERGED, convert=split_rows(modules), converts_quantized=True)


MODEL = Phi3ForCausalLM
