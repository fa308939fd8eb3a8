"""BLOOM: positions are slopes of the scores of attention (ALiBi), and the embedding has a norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.worker.layers import LayerNorm, PlainMLP, alibi_slopes
from quire.worker.layers.plain_attention import PlainAttention
from quire.worker.models.checkpoint_map import QKV, CheckpointMap, split_qkv
from quire.worker.models.llama import LlamaDecoderLayer, LlamaLike, LlamaModel, Parts

# The original files hold the backbone alone, without a prefix.
PREFIXES = {"transformer.": "model."} | {
    f"{part}.": f"model.{part}." for part in ("word_embeddings", "word_embeddings_layernorm", "h", "ln_f")
}
MODULES = {
    "word_embeddings": "embed_tokens",
    "h": "layers",
    "self_attention": "self_attn",
    "dense": "o_proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
    "ln_f": "norm",
}


def make_attention(config: Any, index: int, name: str, rotary: Any) -> PlainAttention:
    num_heads = config.num_attention_heads
    return PlainAttention(config.hidden_size, num_heads, num_heads, name=name, slopes=alibi_slopes(num_heads))


def make_mlp(config: Any, index: int) -> PlainMLP:
    return PlainMLP(config.hidden_size, 4 * config.hidden_size, "gelu_pytorch_tanh", bias=True)


def make_norm(config: Any) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.layer_norm_epsilon)


class NormedSumLayer(LlamaDecoderLayer):
    """What each half gives is added to the norm of what it was given."""

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = self.input_layernorm(hidden if residual is None else hidden + residual)
        hidden = self.post_attention_layernorm(hidden + self.self_attn(positions, hidden))
        return self.mlp(hidden), hidden


class BloomModel(LlamaModel):
    def __init__(self, config: Any, *arguments: Any, **further: Any) -> None:
        super().__init__(config, *arguments, **further)
        self.word_embeddings_layernorm = make_norm(config)

    def enter(self, embedded: Tensor, positions: Tensor) -> Tensor:
        return self.word_embeddings_layernorm(embedded)


class BloomForCausalLM(LlamaLike):
    architectures = ("BloomForCausalLM",)
    parts = Parts(make_attention, make_mlp, make_norm, model=BloomModel, rotary=None)
    config_names = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embed": "hidden_size"}
    config_defaults = {
        "vocab_size": 250_880,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    }

    def __init__(self, config: Any, max_model_len: int) -> None:
        layer = NormedSumLayer if config.apply_residual_connection_post_layernorm else LlamaDecoderLayer
        super().__init__(config, max_model_len, parts=replace(self.parts, layer=layer))
        num_heads = config.num_attention_heads
        self.checkpoint_map = CheckpointMap(
            merged=QKV,
            modules=MODULES,
            prefixes=PREFIXES,
            convert=split_qkv(num_heads, num_heads),
        )


MODEL = BloomForCausalLM
