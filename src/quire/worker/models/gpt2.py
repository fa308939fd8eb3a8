"""GPT-2: learned positions, layer norms, and weights that are stored the other way round."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.attention import Attention
from quire.worker.layers import (
    ColumnParallelLinear,
    Embedding,
    LayerNorm,
    QKVParallelLinear,
    RowParallelLinear,
    VocabEmbedding,
    activation,
)
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import CheckpointMap


class GPT2Attention(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        head_dim = config.n_embd // config.n_head
        scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        self.qkv_proj = QKVParallelLinear(config.n_embd, head_dim, config.n_head, config.n_head)
        self.c_proj = RowParallelLinear(config.n_embd, config.n_embd)
        self.attn = Attention(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, scale, name=f"model.h.{index}.attn.attn"
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.c_proj(self.attn(*self.qkv_proj(hidden)))


class GPT2MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = ColumnParallelLinear(config.n_embd, inner)
        self.act = activation(config.activation_function)
        self.c_proj = RowParallelLinear(inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class GPT2Block(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, index)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class GPT2Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wte = VocabEmbedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(GPT2Block(config, index) for index in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.wte(input_ids) if input_embeds is None else input_embeds
        hidden = hidden + self.wpe(positions)
        for block in self.h:
            hidden = block(hidden)
        return self.ln_f(hidden)


def as_linear(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """GPT-2 stores [in, out] where a linear layer has [out, in], and query, key and value in one."""
    if not name.endswith((".c_attn.weight", ".c_attn.bias", ".c_proj.weight", ".c_fc.weight")):
        return [(name, tensor)]
    if name.endswith("weight") and tensor.ndim == 2:
        tensor = tensor.t()
    if ".c_attn." not in name or tensor.shape[0] % 3:
        return [(name, tensor)]
    return [(name.replace("c_attn", f"{part}_proj"), piece) for part, piece in zip("qkv", tensor.chunk(3), strict=True)]


class GPT2LMHeadModel(CausalLM):
    architectures = ("GPT2LMHeadModel",)
    checkpoint_map = CheckpointMap(
        merged={f"{part}_proj": ("qkv_proj", part) for part in "qkv"},
        # the original files hold the backbone alone, without a prefix
        prefixes={"transformer.": "model."} | {f"{part}.": f"model.{part}." for part in ("wte", "wpe", "h", "ln_f")},
        ignored=(".attn.bias", ".attn.masked_bias"),
        convert=as_linear,
    )
    config_names = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    config_defaults = {
        "vocab_size": 50_257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }

    def __init__(self, config: Any, max_model_len: int) -> None:
        if config.add_cross_attention:
            raise ModelError("config.json: add_cross_attention=True means an encoder, which Quire does not have.")
        model = GPT2Model(config)
        super().__init__(model, head_of(config, model.wte))


MODEL = GPT2LMHeadModel
