"""Qwen 3: queries and keys are normalised head by head before their positions are turned in."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.worker.attention import Heads
from quire.worker.layers import RMSNorm
from quire.worker.model_config import Nullable
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaAttention, LlamaModel
from quire.worker.models.qwen2 import complete_windows, window_of_layer


class Qwen3Attention(LlamaAttention):
    def __init__(
        self,
        config: Any,
        index: int,
        name: str,
        rotary: nn.Module,
        window: int | None = None,
        *,
        output_bias: bool | None = None,
    ) -> None:
        """`window`: where not the kind of the layer decides it. `output_bias`: where it is not that of the others."""
        bias = getattr(config, "attention_bias", False)
        window = window_of_layer(config, index) if window is None else window
        output_bias = bias if output_bias is None else output_bias
        super().__init__(config, name, rotary, qkv_bias=bias, output_bias=output_bias, sliding_window=window)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        return self.o_proj(self.attn(query, key, value, Heads(self.rotary, positions, self.q_norm, self.k_norm)))


class Qwen3ForCausalLM(CausalLM):
    architectures = ("Qwen3ForCausalLM",)
    checkpoint_map = CheckpointMap(merged=MERGED)
    config_defaults = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": Nullable(32),
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": Nullable(4096),
        "max_window_layers": 28,
        "layer_types": None,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_windows)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = LlamaModel(config, max_model_len, Qwen3Attention)
        super().__init__(model, head_of(config, model.embed_tokens))


MODEL = Qwen3ForCausalLM
