"""Phi 1 and 2: attention and feed-forward layer side by side, a part of each head turned, and a bias on everything."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.worker.attention import Heads
from quire.worker.layers import LayerNorm, PlainMLP, RotaryEmbedding, VocabEmbedding
from quire.worker.models.bloom import QKV
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.models.llama import LlamaAttention, complete_kv_heads


class PhiAttention(LlamaAttention):
    def __init__(self, config: Any, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__(config, f"model.layers.{index}.self_attn", rotary, qkv_bias=True, output_bias=True)
        self.has_norms = config.qk_layernorm
        if self.has_norms:
            self.q_layernorm = LayerNorm(self.head_dim, config.layer_norm_eps)
            self.k_layernorm = LayerNorm(self.head_dim, config.layer_norm_eps)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        if self.has_norms:
            query = self.q_layernorm(query.reshape(-1, self.head_dim)).view(query.shape)
            key = self.k_layernorm(key.reshape(-1, self.head_dim)).view(key.shape)
        return self.o_proj(self.attn(query, key, value, Heads(self.rotary, positions)))


class PhiDecoderLayer(nn.Module):
    """Both branches see the same hidden states."""

    def __init__(self, config: Any, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = PhiAttention(config, index, rotary)
        self.mlp = PlainMLP(config.hidden_size, config.intermediate_size, config.hidden_act, bias=True)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        x = self.input_layernorm(hidden)
        return self.self_attn(positions, x) + self.mlp(x) + hidden


class PhiModel(nn.Module):
    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        rotary = RotaryEmbedding.from_config(config, max_model_len)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PhiDecoderLayer(config, index, rotary) for index in range(config.num_hidden_layers))
        self.final_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return self.final_layernorm(hidden)


class PhiForCausalLM(CausalLM):
    architectures = ("PhiForCausalLM",)
    checkpoint_map = CheckpointMap(merged=QKV, modules={"dense": "o_proj", "fc1": "up_proj", "fc2": "down_proj"})
    config_defaults = {
        "vocab_size": 51_200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_kv_heads)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = PhiModel(config, max_model_len)
        super().__init__(model, head_of(config, model.embed_tokens, bias=True))


MODEL = PhiForCausalLM
