"""OPT: learned positions that start at 2, and norms before (or, at 350M parameters, after) each branch."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker.layers import Embedding, LayerNorm, LMHead, PlainMLP, ReplicatedLinear, VocabEmbedding
from quire.worker.layers.plain_attention import PlainAttention
from quire.worker.models.causal_lm import CausalLM
from quire.worker.models.checkpoint_map import QKV, CheckpointMap

# Two rows of the table belong to padding, which does not exist here.
POSITION_OFFSET = 2


class OPTDecoderLayer(nn.Module):
    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        size, affine, has_bias = config.hidden_size, config.layer_norm_elementwise_affine, config.enable_bias
        num_heads = config.num_attention_heads
        self.is_norm_first = config.do_layer_norm_before
        self.self_attn = PlainAttention(size, num_heads, num_heads, name=f"{name}.self_attn", bias=has_bias)
        self.self_attn_layer_norm = LayerNorm(size, affine=affine)
        self.mlp = PlainMLP(size, config.ffn_dim, config.activation_function, bias=has_bias)
        self.final_layer_norm = LayerNorm(size, affine=affine)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        if self.is_norm_first:
            hidden = hidden + self.self_attn(positions, self.self_attn_layer_norm(hidden))
            return hidden + self.mlp(self.final_layer_norm(hidden))
        hidden = self.self_attn_layer_norm(hidden + self.self_attn(positions, hidden))
        return self.final_layer_norm(hidden + self.mlp(hidden))


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
            OPTDecoderLayer(config, f"model.layers.{index}") for index in range(config.num_hidden_layers)
        )

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + F.embedding(positions, self.embed_positions.weight[POSITION_OFFSET:])
        for layer in self.layers:
            hidden = layer(positions, hidden)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)


class OPTForCausalLM(CausalLM):
    architectures = ("OPTForCausalLM",)
    checkpoint_map = CheckpointMap(
        merged=QKV,
        modules={"out_proj": "o_proj", "fc1": "mlp.up_proj", "fc2": "mlp.down_proj"},
        # the original files hold the backbone alone
        prefixes={"model.decoder.": "model.", "decoder.": "model."},
    )
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
        model = OPTDecoder(config)
        tied_to = model.embed_tokens if config.tie_word_embeddings else None
        super().__init__(model, LMHead(config.vocab_size, config.word_embed_proj_dim, tied_to=tied_to))


MODEL = OPTForCausalLM
