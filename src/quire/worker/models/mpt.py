"""MPT: ALiBi, norms without a bias, and no other biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import LayerNorm, PlainMLP, VocabEmbedding, alibi_slopes
from quire.worker.models.bloom import QKV, PlainAttention
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import CheckpointMap

# What published models have; with another value the library that they come from computes something else.
_KNOWN = {
    "alibi": (True,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "clip_qkv": (None, 0),
    "attn_uses_sequence_id": (False,),
    "attn_type": ("multihead_attention",),
}


class MptBlock(nn.Module):
    def __init__(self, config: Any, index: int, slopes: Tensor) -> None:
        super().__init__()
        size, heads = config.d_model, config.n_heads
        scale = config.attn_config.get("softmax_scale")
        self.norm_1 = LayerNorm(size, config.layer_norm_epsilon, bias=False)
        self.attn = PlainAttention(
            size, heads, heads, name=f"model.blocks.{index}.attn", bias=False, slopes=slopes, scale=scale
        )
        self.norm_2 = LayerNorm(size, config.layer_norm_epsilon, bias=False)
        self.ffn = PlainMLP(size, 4 * size, "gelu", bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.norm_1(hidden))
        return hidden + self.ffn(self.norm_2(hidden))


class MptModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        slopes = alibi_slopes(config.n_heads, float(config.attn_config.get("alibi_bias_max", 8)))
        self.wte = VocabEmbedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(MptBlock(config, index, slopes) for index in range(config.n_layers))
        self.norm_f = LayerNorm(config.d_model, config.layer_norm_epsilon, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.wte(input_ids) if input_embeds is None else input_embeds
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm_f(hidden)


def complete_config(config: Any) -> None:
    config.attn_config = config.attn_config or {}
    for name, known in _KNOWN.items():
        value = config.attn_config.get(name, known[0])
        if value not in known:
            raise ModelError(
                f"config.json: attn_config.{name}={value!r}: must be {known[0]!r}, as in the published models: another "
                "one is not built."
            )


def split_thirds(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Queries, keys and values are one tensor, one behind the other."""
    if ".Wqkv." not in name:
        return [(name, weight)]
    return [(name.replace("Wqkv", part), rows) for part, rows in zip(QKV, torch.chunk(weight, 3), strict=True)]


class MptForCausalLM(CausalLM):
    architectures = ("MptForCausalLM", "MPTForCausalLM")
    checkpoint_map = CheckpointMap(
        merged=QKV, modules={"out_proj": "o_proj"}, prefixes={"transformer.": "model."}, convert=split_thirds
    )
    config_names = {"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"}
    config_defaults = {
        "vocab_size": 50_368,
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "layer_norm_epsilon": 1e-5,
        "attn_config": None,
        "tie_word_embeddings": True,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = MptModel(config)
        super().__init__(model, head_of(config, model.wte))


MODEL = MptForCausalLM
