"""Falcon, old and new: attention and feed-forward layer side by side, few heads of keys, rotary positions or ALiBi."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import LayerNorm, PlainMLP, RotaryEmbedding, VocabEmbedding, alibi_slopes
from quire.worker.models.bloom import MODULES, PREFIXES, QKV, PlainAttention
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import CheckpointMap, split_qkv


class FalconAttention(PlainAttention):
    def __init__(self, config: Any, index: int, rotary: RotaryEmbedding | None) -> None:
        size, heads = config.hidden_size, config.num_attention_heads
        slopes = None
        if rotary is None:
            # rounded, and scaled as the scores are: so they were published
            slopes = alibi_slopes(heads).bfloat16().float() * (size // heads) ** -0.5
        name = f"model.h.{index}.self_attention"
        super().__init__(size, heads, num_kv_heads(config), name=name, bias=config.bias, slopes=slopes)
        self.rotary = rotary

    def turned(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """Attention of what positions have turned, if they do."""
        query, key, value = self.qkv_proj(hidden)
        if self.rotary is not None:
            self.rotary(positions, query, key, self.head_dim)
        return self.o_proj(self.attn(query, key, value))


class FalconBlock(nn.Module):
    """Both branches see the same hidden states, through one norm or one each; or one branch sees the other's output."""

    def __init__(self, config: Any, index: int, rotary: RotaryEmbedding | None) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.self_attention = FalconAttention(config, index, rotary)
        self.mlp = PlainMLP(size, config.ffn_hidden_size, config.activation, bias=config.bias)
        self.is_parallel = config.parallel_attn
        self.has_two_norms = has_two_norms(config)
        names = ["ln_attn", "ln_mlp"] if self.is_parallel else ["input_layernorm", "post_attention_layernorm"]
        if not self.has_two_norms:
            names = ["input_layernorm"]
        self.norms = nn.ModuleDict({name: LayerNorm(size, eps) for name in names})

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        norms = list(self.norms.values())
        last = norms[-1]
        x = norms[0](hidden)
        attended = self.self_attention.turned(positions, x)
        if not self.is_parallel:
            hidden = hidden + attended
            return hidden + self.mlp(last(hidden))
        return hidden + (self.mlp(last(hidden) if self.has_two_norms else x) + attended)


class FalconModel(nn.Module):
    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        rotary = None if config.alibi else RotaryEmbedding.from_config(config, max_model_len)
        self.word_embeddings = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(FalconBlock(config, index, rotary) for index in range(config.num_hidden_layers))
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.word_embeddings(input_ids) if input_embeds is None else input_embeds
        for block in self.h:
            hidden = block(positions, hidden)
        return self.ln_f(hidden)


def num_kv_heads(config: Any) -> int:
    """What the file says of their number counts in new models alone."""
    if config.new_decoder_architecture:
        return config.num_kv_heads
    return 1 if config.multi_query else config.num_attention_heads


def has_two_norms(config: Any) -> bool:
    if config.new_decoder_architecture:
        return config.num_ln_in_parallel_attn in (None, 2)
    return not config.parallel_attn


def complete_config(config: Any) -> None:
    heads = config.num_attention_heads
    config.head_dim = config.hidden_size // heads
    if config.num_kv_heads is None:
        config.num_kv_heads = heads
    if config.ffn_hidden_size is None:
        config.ffn_hidden_size = 4 * config.hidden_size
    if config.new_decoder_architecture and not config.parallel_attn:
        raise ModelError(
            "config.json: parallel_attn=false, new_decoder_architecture=true: this kind of layer is always parallel. "
            "Take the config.json that belongs to the weights."
        )
    if config.num_kv_heads < 1 or heads % config.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads={heads} is no multiple of num_kv_heads={config.num_kv_heads}. "
            "Take the config.json that belongs to the weights."
        )


class FalconForCausalLM(CausalLM):
    architectures = ("FalconForCausalLM", "RWForCausalLM")
    config_names = {"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    config_defaults = {
        "vocab_size": 65_024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "num_kv_heads": None,
        "num_ln_in_parallel_attn": None,
        "layer_norm_epsilon": 1e-5,
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "max_position_embeddings": 2048,
        "ffn_hidden_size": None,
        "activation": "gelu",
        "tie_word_embeddings": True,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = FalconModel(config, max_model_len)
        super().__init__(model, head_of(config, model.word_embeddings))
        norms = ("input_layernorm", "post_attention_layernorm", "ln_attn", "ln_mlp")
        self.checkpoint_map = CheckpointMap(
            merged=QKV,
            modules={**MODULES, **{name: f"norms.{name}" for name in norms}},
            prefixes=PREFIXES,
            convert=split_qkv("query_key_value", config.num_attention_heads, num_kv_heads(config)),
        )


MODEL = FalconForCausalLM
