"""OPT: learned positions that start at 2, and norms before (or, at 350M parameters, after) each branch."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker.attention import Attention
from quire.worker.layers import (
    ColumnParallelLinear,
    Embedding,
    LayerNorm,
    LMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabEmbedding,
    activation,
)
from quire.worker.models.causal_lm import CausalLM
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap

# Two rows of the table belong to padding, which does not exist here.
POSITION_OFFSET = 2


class OPTAttention(nn.Module):
    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        size, num_heads = config.hidden_size, config.num_attention_heads
        head_dim = size // num_heads
        self.qkv_proj = QKVParallelLinear(size, head_dim, num_heads, num_heads, bias=config.enable_bias)
        self.out_proj = RowParallelLinear(size, size, bias=config.enable_bias)
        self.attn = Attention(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, head_dim**-0.5, name=f"{name}.attn"
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out_proj(self.attn(*self.qkv_proj(hidden)))


class OPTDecoderLayer(nn.Module):
    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        size, affine = config.hidden_size, config.layer_norm_elementwise_affine
        self.is_norm_first = config.do_layer_norm_before
        self.self_attn = OPTAttention(config, f"{name}.self_attn")
        self.self_attn_layer_norm = LayerNorm(size, affine=affine)
        self.fc1 = ColumnParallelLinear(size, config.ffn_dim, bias=config.enable_bias)
        self.act = activation(config.activation_function)
        self.fc2 = RowParallelLinear(config.ffn_dim, size, bias=config.enable_bias)
        self.final_layer_norm = LayerNorm(size, affine=affine)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.is_norm_first:
            hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden))
            return hidden + self._feed_forward(self.final_layer_norm(hidden))
        hidden = self.self_attn_layer_norm(hidden + self.self_attn(hidden))
        return self.final_layer_norm(hidden + self._feed_forward(hidden))

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(hidden)))


class OPTDecoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, embedding_size = config.hidden_size, config.word_embed_proj_dim
        self.embed_tokens = VocabEmbedding(config.vocab_size, embedding_size)
        self.embed_positions = Embedding(config.max_position_embeddings + POSITION_OFFSET, size)
        is_projected = embedding_size != size
        self.project_in = ReplicatedLinear(embedding_size, size, bias=False) if is_projected else None
        self.project_out = ReplicatedLinear(size, embedding_size, bias=False) if is_projected else None
        has_final_norm = config.do_layer_norm_before and not getattr(config, "_remove_final_layer_norm", False)
        affine = config.layer_norm_elementwise_affine
        self.final_layer_norm = LayerNorm(size, affine=affine) if has_final_norm else None
        self.layers = nn.ModuleList(
            OPTDecoderLayer(config, f"model.decoder.layers.{index}") for index in range(config.num_hidden_layers)
        )

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + F.embedding(positions, self.embed_positions.weight[POSITION_OFFSET:])
        for layer in self.layers:
            hidden = layer(hidden)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)


class OPTModel(nn.Module):
    """The level that names in checkpoints have: model.decoder.layers..."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config)

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        return self.decoder(input_ids, positions, input_embeds)


class OPTForCausalLM(CausalLM):
    architectures = ("OPTForCausalLM",)
    # the original files hold the backbone alone
    checkpoint_map = CheckpointMap(merged=MERGED, prefixes={"decoder.": "model.decoder."})
    config_defaults = {
        "vocab_size": 50_272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "word_embed_proj_dim": None,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "enable_bias": True,
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
        "_remove_final_layer_norm": False,
    }

    @staticmethod
    def complete_config(config: Any) -> None:
        if config.word_embed_proj_dim is None:
            config.word_embed_proj_dim = config.hidden_size

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = OPTModel(config)
        embedding = model.decoder.embed_tokens
        tied_to = embedding if config.tie_word_embeddings else None
        super().__init__(model, LMHead(config.vocab_size, config.word_embed_proj_dim, tied_to=tied_to))


MODEL = OPTForCausalLM
