"""Llama 1 to 3, and every checkpoint that calls itself one.

Longer than most: many families are this decoder with other parts, and its seams for them are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.attention import Attention, Heads
from quire.worker.layers import (
    GatedMLP,
    NoPositions,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabEmbedding,
)
from quire.worker.layers.rotary import rotary_of_layers
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap

# (config, index of the layer, name of the attention module, rotary embedding) -> attention module
MakeAttention: TypeAlias = Callable[[Any, int, str, Any], nn.Module]
# (config, index of the layer) -> feed-forward module
MakeMLP: TypeAlias = Callable[[Any, int], nn.Module]
# config -> norm of the hidden states
MakeNorm: TypeAlias = Callable[[Any], nn.Module]
# size of a head -> norm of the heads of queries or of keys
MakeHeadNorm: TypeAlias = Callable[[int], nn.Module]


class LlamaAttention(nn.Module):
    def __init__(
        self,
        config: Any,
        name: str,
        rotary: nn.Module,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        sliding_window: int = 0,
        scale: float | None = None,
        make_head_norm: MakeHeadNorm | None = None,
    ) -> None:
        """`scale`: of queries times keys, where it is not 1 / sqrt(head_dim). `make_head_norm`: queries and keys are
        normalised head by head, before their positions are turned in."""
        super().__init__()
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rotary = rotary
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, config.num_attention_heads, config.num_key_value_heads, bias=qkv_bias
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim, config.hidden_size, bias=output_bias
        )
        self.q_norm: Any = None
        self.k_norm: Any = None
        if make_head_norm is not None:
            self.q_norm = make_head_norm(self.head_dim)
            self.k_norm = make_head_norm(self.head_dim)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5 if scale is None else scale,
            name=f"{name}.attn",
            sliding_window=sliding_window,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        return self.o_proj(self.attn(query, key, value, Heads(self.rotary, positions, self.q_norm, self.k_norm)))


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> LlamaAttention:
    bias = getattr(config, "attention_bias", False)
    return LlamaAttention(config, name, rotary, qkv_bias=bias, output_bias=bias)


class LlamaMLP(GatedMLP):
    def __init__(self, config: Any, *, bias: bool, inner_size: int | None = None) -> None:
        """`inner_size`: where it is not that of the configuration."""
        super().__init__(config.hidden_size, inner_size or config.intermediate_size, config.hidden_act, bias=bias)


def make_mlp(config: Any, index: int) -> LlamaMLP:
    return LlamaMLP(config, bias=getattr(config, "mlp_bias", False))


def make_plain_mlp(config: Any, index: int) -> LlamaMLP:
    """Without a bias, whatever the configuration has."""
    return LlamaMLP(config, bias=False)


def make_norm(config: Any) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps)


def make_centred_norm(config: Any) -> RMSNorm:
    """Checkpoints hold what is to be added to one."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, is_zero_centred=True)


def norm_of_sum(norm: nn.Module, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(hidden + residual), hidden + residual): what a layer begins with. The first one has no residual."""
    if residual is None:
        return norm(hidden), hidden
    normed: tuple[Tensor, Tensor] = norm(hidden, residual)
    return normed


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: Any, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm = make_norm) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = make_norm(config)
        self.post_attention_layernorm = make_norm(config)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`residual` is what the layers before have summed up; the last branch is still to be added to it."""
        hidden, residual = norm_of_sum(self.input_layernorm, hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class ParallelDecoderLayer(nn.Module):
    """Both branches see the same hidden states, through one norm or one each."""

    def __init__(
        self, config: Any, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm, *, has_two_norms: bool = False
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = make_norm(config)
        self.mlp_layernorm = make_norm(config) if has_two_norms else None

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As LlamaDecoderLayer's: both branches are still to be added."""
        hidden, residual = norm_of_sum(self.input_layernorm, hidden, residual)
        attended = self.self_attn(positions, hidden)
        if self.mlp_layernorm is not None:
            hidden = self.mlp_layernorm(residual)
        return attended + self.mlp(hidden), residual


class PostNormDecoderLayer(nn.Module):
    """Norms stand behind each half, before what it gives is added."""

    def __init__(self, config: Any, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm = make_norm) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.post_attention_layernorm = make_norm(config)
        self.post_feedforward_layernorm = make_norm(config)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As LlamaDecoderLayer's: the last branch is still to be added."""
        hidden = hidden if residual is None else residual + hidden
        hidden = hidden + self.post_attention_layernorm(self.self_attn(positions, hidden))
        return self.post_feedforward_layernorm(self.mlp(hidden)), hidden


class LlamaModel(nn.Module):
    def __init__(
        self,
        config: Any,
        max_model_len: int,
        make_attention: MakeAttention,
        make_mlp: MakeMLP = make_mlp,
        make_norm: MakeNorm = make_norm,
        *,
        layer_class: Callable[[Any, nn.Module, nn.Module, MakeNorm], nn.Module] = LlamaDecoderLayer,
        rotary_class: type[RotaryEmbedding] | None = RotaryEmbedding,
        is_interleaved: bool = False,
        embedding_multiplier: float = 1.0,
    ) -> None:
        """`rotary_class`: None where something else knows the order of tokens. `is_interleaved`: how rotary dimensions
        are paired (layers/rotary.py)."""
        super().__init__()
        rotary: list[Any] = [NoPositions()] * config.num_hidden_layers
        if rotary_class is not None:
            rotary = rotary_of_layers(config, max_model_len, rotary_class, is_interleaved=is_interleaved)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            layer_class(
                config,
                make_attention(config, index, f"model.layers.{index}.self_attn", rotary[index]),
                make_mlp(config, index),
                make_norm,
            )
            for index in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config)
        self.embedding_multiplier = embedding_multiplier

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.embed(input_ids) if input_embeds is None else input_embeds
        hidden = self.enter(hidden, positions)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden

    def embed(self, input_ids: Tensor) -> Tensor:
        """What vectors may stand beside."""
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def enter(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """What the first layer is given: where vectors stand in the place of tokens, too."""
        return embedded if self.embedding_multiplier == 1.0 else embedded * self.embedding_multiplier


def complete_kv_heads(config: Any) -> None:
    """Null heads of keys mean as many as of queries."""
    num_heads = config.num_attention_heads
    # some families have no such key
    num_kv_heads = getattr(config, "num_key_value_heads", num_heads)
    if num_kv_heads is None:
        config.num_key_value_heads = num_kv_heads = num_heads
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}. "
            "Take the config.json that belongs to the weights."
        )


def complete_heads(config: Any) -> None:
    """The same, and a null head_dim is what hidden_size leaves for each."""
    complete_kv_heads(config)
    if getattr(config, "head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class Parts:
    """What a decoder of this frame is made of; where it does not say, it is Llama."""

    attention: MakeAttention = make_attention
    mlp: MakeMLP = make_mlp
    norm: MakeNorm = make_norm
    layer: Callable[[Any, nn.Module, nn.Module, MakeNorm], nn.Module] = LlamaDecoderLayer
    model: type[LlamaModel] = LlamaModel
    rotary: type[RotaryEmbedding] | None = RotaryEmbedding
    is_interleaved: bool = False


class LlamaLike(CausalLM):
    """A decoder of this frame: a subclass says of which parts, and what config.json may leave out."""

    parts: ClassVar[Parts] = Parts()
    has_head_bias = False
    checkpoint_map = CheckpointMap(merged=MERGED)
    complete_config: Callable[[Any], None] = staticmethod(complete_heads)

    def __init__(
        self, config: Any, max_model_len: int, *, parts: Parts | None = None, embedding_multiplier: float = 1.0
    ) -> None:
        """`parts`: where the configuration decides them."""
        parts = self.parts if parts is None else parts
        model = parts.model(
            config,
            max_model_len,
            parts.attention,
            parts.mlp,
            parts.norm,
            layer_class=parts.layer,
            rotary_class=parts.rotary,
            is_interleaved=parts.is_interleaved,
            embedding_multiplier=embedding_multiplier,
        )
        super().__init__(model, head_of(config, model.embed_tokens, bias=self.has_head_bias))


class LlamaForCausalLM(LlamaLike):
    architectures = ("LlamaForCausalLM", "LLaMAForCausalLM")
    config_defaults = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


MODEL = LlamaForCausalLM
