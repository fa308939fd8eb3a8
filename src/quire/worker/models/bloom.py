"""BLOOM: positions are slopes of the scores of attention (ALiBi), and the embedding has a norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.worker.attention import Attention
from quire.worker.layers import LayerNorm, PlainMLP, QKVParallelLinear, RowParallelLinear, VocabEmbedding, alibi_slopes
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap, split_qkv


class PlainAttention(nn.Module):
    """Attention whose positions are slopes, or come from elsewhere."""

    def __init__(
        self,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        name: str,
        bias: bool,
        slopes: Tensor | None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = size // num_heads
        self.qkv_proj = QKVParallelLinear(size, self.head_dim, num_heads, num_kv_heads, bias=bias)
        self.o_proj = RowParallelLinear(size, size, bias=bias)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5 if scale is None else scale,
            name=f"{name}.attn",
            slopes=slopes,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.o_proj(self.attn(*self.qkv_proj(hidden)))


class BloomBlock(nn.Module):
    def __init__(self, config: Any, index: int, slopes: Tensor) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.n_head
        name = f"model.h.{index}.self_attention"
        self.input_layernorm = LayerNorm(size, config.layer_norm_epsilon)
        self.self_attention = PlainAttention(size, heads, heads, name=name, bias=True, slopes=slopes)
        self.post_attention_layernorm = LayerNorm(size, config.layer_norm_epsilon)
        self.mlp = PlainMLP(size, 4 * size, "gelu_pytorch_tanh", bias=True)
        self.adds_to_norm = config.apply_residual_connection_post_layernorm

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.input_layernorm(hidden)
        hidden = (x if self.adds_to_norm else hidden) + self.self_attention(x)
        x = self.post_attention_layernorm(hidden)
        return (x if self.adds_to_norm else hidden) + self.mlp(x)


class BloomModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        slopes = alibi_slopes(config.n_head)
        self.word_embeddings = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.word_embeddings_layernorm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.h = nn.ModuleList(BloomBlock(config, index, slopes) for index in range(config.n_layer))
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.word_embeddings(input_ids) if input_embeds is None else input_embeds
        hidden = self.word_embeddings_layernorm(hidden)
        for block in self.h:
            hidden = block(hidden)
        return self.ln_f(hidden)


# The original files hold the backbone alone, without a prefix.
PREFIXES = {"transformer.": "model."} | {
    f"{part}.": f"model.{part}." for part in ("word_embeddings", "word_embeddings_layernorm", "h", "ln_f")
}
MODULES = {"dense": "o_proj", "dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj"}
QKV = {name: MERGED[name] for name in ("q_proj", "k_proj", "v_proj")}


class BloomForCausalLM(CausalLM):
    architectures = ("BloomForCausalLM",)
    config_names = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"}
    config_defaults = {
        "vocab_size": 250_880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    }

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = BloomModel(config)
        super().__init__(model, head_of(config, model.word_embeddings))
        convert = split_qkv("query_key_value", config.n_head, config.n_head)
        self.checkpoint_map = CheckpointMap(merged=QKV, modules=MODULES, prefixes=PREFIXES, convert=convert)


MODEL = BloomForCausalLM
