"""Gemma 4, its text: layers with a window and layers without have heads of different sizes and numbers.

h = h + norm(attention(norm(h)))
h = h + norm(mlp(norm(h)))                     beside the mlp may stand experts, with norms and a router of their own
h = h + norm(up(act(down(h)) * own_input))     what a token's own table and its embedding say to this layer, if they do
h = h * scalar

The last layers may keep no keys and values: they look at those of the last layer of their kind that does.

Longer than most: heads of two sizes, keys that layers share, inputs of each layer and experts beside the mlp are this
family's alone, and each checkpoint chooses among them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from quire.config.mixed_shape import FULL, SLIDING, MixedLayer, MixedShape
from quire.errors import ModelError
from quire.worker.attention import Attention
from quire.worker.layers import (
    Experts,
    PlainNorm,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    Routing,
    RowParallelLinear,
    VocabEmbedding,
    activation,
    make_parameter,
)
from quire.worker.layers.parameter import Part
from quire.worker.model_config import Nullable
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap, split_experts
from quire.worker.models.llama import LlamaMLP, make_norm

_DEFAULT_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
_KEPT = re.compile(r".*\blayers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\b.*")


def constant(value: float, size: int) -> Tensor:
    """A factor for rows of this size, rounded as the model's type rounds it."""
    return torch.full((size,), value)


def num_parts(shape: MixedShape, index: int) -> int:
    """Into how many pieces the heads of a layer are cut, each with a cache of its own.

    A block of the KV cache has room for all layers without a window, and as many layers with one as keep as much.
    Where that is no whole number (5 layers, of which 2 keep as much as one with a window), pieces fill it.
    """
    full = [layer.num_rows * layer.head_dim for layer in shape.layers if layer.source is None and not layer.window]
    layer = shape.layers[index]
    kept = layer.num_rows * layer.head_dim
    if not layer.window or not full or len(set(full)) > 1 or kept % full[0]:
        return 1
    ratio = kept // full[0]
    return ratio if len(full) % ratio and layer.num_kv_heads % ratio == 0 else 1


class Gemma4Attention(nn.Module):
    def __init__(
        self, config: Any, index: int, rotary: RotaryEmbedding, source: Gemma4Attention | None, name: str
    ) -> None:
        """`source`: whose keys and values it looks at."""
        super().__init__()
        layer: MixedLayer = config.shape.layers[index]
        size, bias = config.hidden_size, config.attention_bias
        self.head_dim = layer.head_dim
        self.rotary = rotary
        self.pieces: nn.ModuleList
        self.is_reader = source is not None
        parts: tuple[Part, ...] = ("q",) if source else ("q", "k") if layer.has_one_projection else ("q", "k", "v")
        self.qkv_proj = QKVParallelLinear(
            size, layer.head_dim, config.num_attention_heads, layer.num_kv_heads, bias=bias, parts=parts
        )
        self.o_proj = RowParallelLinear(config.num_attention_heads * layer.head_dim, size, bias=bias)
        self.q_norm = RMSNorm(layer.head_dim, config.rms_norm_eps)
        if source is not None:
            self.pieces = source.pieces
            return
        self.k_norm = RMSNorm(layer.head_dim, config.rms_norm_eps)
        self.v_norm = PlainNorm(layer.head_dim, config.rms_norm_eps)
        count = num_parts(config.shape, index)
        self.pieces = nn.ModuleList(
            Attention(
                self.qkv_proj.num_heads // count,
                self.qkv_proj.num_kv_heads // count,
                layer.head_dim,
                1.0,
                name=f"{name}.attn" if count == 1 else f"{name}.attn.{number}",
                sliding_window=layer.window,
            )
            for number in range(count)
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, *kept = self.qkv_proj(hidden)
        query = self._normed(self.q_norm, query)
        if self.is_reader:
            self.rotary(positions, query, None, self.head_dim)
            return self.o_proj(self._attend(query))
        # one projection may be both, before norms and angles
        key, value = self._normed(self.k_norm, kept[0]), self._normed(self.v_norm, kept[-1])
        self.rotary(positions, query, key, self.head_dim)
        return self.o_proj(self._attend(query, key, value))

    def _attend(self, *rows: Tensor) -> Tensor:
        if len(self.pieces) == 1:
            return self.pieces[0](*rows)
        heads = zip(*(x.chunk(len(self.pieces), dim=-1) for x in rows), strict=True)
        return torch.cat([piece(*of_piece) for piece, of_piece in zip(self.pieces, heads, strict=True)], dim=-1)

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x.view(x.shape[0], -1, self.head_dim)).flatten(1)


class Gemma4Experts(Experts):
    """A router that scales what it reads, and experts that read another norm of the same hidden states."""

    def __init__(self, config: Any) -> None:
        size = config.hidden_size
        super().__init__(
            size,
            config.moe_intermediate_size,
            config.num_experts,
            Routing(config.top_k_experts),
            config.hidden_act,
        )
        self.input_norm = make_norm(config)
        self.router_norm = RMSNorm(size, config.rms_norm_eps)
        self.router_norm.weight = make_parameter(size, pick=partial(_times, size**-0.5))
        self.per_expert_scale = make_parameter(config.num_experts)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = super()._route(self.router_norm(x))
        return weights * self.per_expert_scale.float()[ids.long()], ids

    def _outputs(self, x: Tensor, ids: Tensor) -> Tensor:
        return super()._outputs(self.input_norm(x), ids)


def _times(factor: float, whole: Tensor, weight: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    return whole, weight.float() * factor


def _spread(whole: Tensor, weight: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """One number for all dimensions."""
    return whole, weight.expand(whole.shape)


class OwnInput(nn.Module):
    """What a layer hears of a token beside the hidden state."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.hidden_size_per_layer_input
        self.per_layer_input_gate = ReplicatedLinear(size, inner, bias=False)
        self.per_layer_projection = ReplicatedLinear(inner, size, bias=False)
        self.post_per_layer_input_norm = make_norm(config)
        self.act = activation(config.hidden_act)

    def forward(self, hidden: Tensor, own_TI: Tensor) -> Tensor:
        gate = self.act(self.per_layer_input_gate(hidden))
        return hidden + self.post_per_layer_input_norm(self.per_layer_projection(gate * own_TI))


class Gemma4Layer(nn.Module):
    def __init__(self, config: Any, index: int, attention: Gemma4Attention) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = LlamaMLP(config, bias=False, inner_size=config.shape.layers[index].intermediate_size)
        self.input_layernorm = make_norm(config)
        self.post_attention_layernorm = make_norm(config)
        self.pre_feedforward_layernorm = make_norm(config)
        self.post_feedforward_layernorm = make_norm(config)
        self.experts = Gemma4Experts(config) if config.enable_moe_block else None
        if self.experts is not None:
            self.post_feedforward_layernorm_1 = make_norm(config)
            self.post_feedforward_layernorm_2 = make_norm(config)
        self.own_input = OwnInput(config) if config.hidden_size_per_layer_input else None
        self.layer_scalar = make_parameter(config.hidden_size, pick=_spread)

    def forward(self, positions: Tensor, hidden: Tensor, own_TI: Tensor | None) -> Tensor:
        attended = self.post_attention_layernorm(self.self_attn(positions, self.input_layernorm(hidden)))
        hidden, residual = self.pre_feedforward_layernorm(attended, hidden)
        hidden = self.mlp(hidden)
        if self.experts is not None:
            chosen = self.post_feedforward_layernorm_2(self.experts(residual))
            hidden = self.post_feedforward_layernorm_1(hidden) + chosen
        hidden = residual + self.post_feedforward_layernorm(hidden)
        if self.own_input is not None:
            hidden = self.own_input(hidden, own_TI)
        return hidden * self.layer_scalar


class Gemma4Model(nn.Module):
    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        size, num_layers = config.hidden_size, config.num_hidden_layers
        self.embed_tokens = VocabEmbedding(config.vocab_size, size)
        self.register_buffer("embed_scale", constant(size**0.5, size), persistent=False)
        self.layers = nn.ModuleList(
            Gemma4Layer(config, index, attention) for index, attention in enumerate(_attentions(config, max_model_len))
        )
        self.norm = make_norm(config)
        self.own_inputs = OwnInputs(config, num_layers) if config.hidden_size_per_layer_input else None

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids) * self.embed_scale

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.embed(input_ids) if input_embeds is None else input_embeds
        own = [None] * len(self.layers) if self.own_inputs is None else self.own_inputs(input_ids, hidden)
        for layer, own_TI in zip(self.layers, own, strict=True):
            hidden = layer(positions, hidden, own_TI)
        return self.norm(hidden)


class OwnInputs(nn.Module):
    """For each token and layer: a row of a table, and a projection of the token's embedding."""

    def __init__(self, config: Any, num_layers: int) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.hidden_size_per_layer_input
        self.inner, width = inner, num_layers * inner
        self.embed_tokens_per_layer = VocabEmbedding(config.vocab_size_per_layer_input, width)
        self.per_layer_model_projection = ReplicatedLinear(size, width, bias=False)
        self.per_layer_projection_norm = RMSNorm(inner, config.rms_norm_eps)
        self.register_buffer("embed_scale", constant(inner**0.5, width), persistent=False)
        self.register_buffer("projection_scale", constant(size**-0.5, width), persistent=False)
        self.register_buffer("sum_scale", constant(2.0**-0.5, width), persistent=False)

    def forward(self, input_ids: Tensor, hidden: Tensor) -> Sequence[Tensor]:
        """Of each layer, [T, size of an input]."""
        looked_up = self.embed_tokens_per_layer(input_ids) * self.embed_scale
        projected = self.per_layer_model_projection(hidden) * self.projection_scale
        normed = self.per_layer_projection_norm(projected.view(len(projected), -1, self.inner)).flatten(1)
        return ((normed + looked_up) * self.sum_scale).split(self.inner, dim=-1)


def _attentions(config: Any, max_model_len: int) -> Sequence[Gemma4Attention]:
    made: list[Gemma4Attention] = []
    rotary: dict[tuple[int, int], RotaryEmbedding] = {}
    for index, layer in enumerate(config.shape.layers):
        kind = layer.window, layer.head_dim
        if kind not in rotary:
            rotary[kind] = _rotary_of(config, layer, max_model_len)
        source = None if layer.source is None else made[layer.source]
        made.append(Gemma4Attention(config, index, rotary[kind], source, f"model.layers.{index}.self_attn"))
    return made


def _rotary_of(config: Any, layer: MixedLayer, max_model_len: int) -> RotaryEmbedding:
    name = SLIDING if layer.window else FULL
    parameters = config.rope_by_kind.get(name)
    if not isinstance(parameters, dict):
        raise ModelError(
            f"config.json: rope_parameters has nothing for {name}. Take the one that belongs to the weights."
        )
    of_kind = SimpleNamespace(
        head_dim=layer.head_dim,
        rope_parameters=parameters,
        max_position_embeddings=config.max_position_embeddings,
    )
    return RotaryEmbedding.from_config(of_kind, max_model_len)


def complete_config(config: Any) -> None:
    shape = MixedShape.of(vars(config))
    assert shape is not None, "this file is for models of these types"
    config.shape = shape
    config.rope_by_kind = config.rope_parameters or _DEFAULT_ROPE
    if config.use_bidirectional_attention == "all":
        raise ModelError(
            "config.json: use_bidirectional_attention='all': tokens see later ones, which a model that generates text "
            "cannot do. Must be null or 'vision', which text does not differ in."
        )
    missing = [name for name in _OF_EXPERTS if getattr(config, name) is None]
    if config.enable_moe_block and missing:
        raise ModelError(
            f"config.json: {missing[0]}=null: must be a whole number, since enable_moe_block=true gives every layer "
            "experts. Set it, or enable_moe_block to false."
        )


def convert(shape: MixedShape, name: str, weight: Any) -> list[tuple[str, Any]]:
    """All experts of a layer are one tensor, [experts, outputs, inputs]. Layers that look at another's keys may come
    with weights to make keys of, which nobody asks for."""
    found = _KEPT.fullmatch(name)
    if found is not None and int(found[1]) < len(shape.layers) and shape.layers[int(found[1])].source is not None:
        return []
    if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return [
            (part_name.replace(".experts.", ".experts.experts.", 1), part)
            for part_name, part in split_experts(name, weight)
        ]
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return [(name, weight)]


_OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
_RENAMED = {
    ".router.proj.": ".experts.gate.",
    ".router.scale": ".experts.router_norm.weight",
    ".router.per_expert_scale": ".experts.per_expert_scale",
    ".pre_feedforward_layernorm_2.": ".experts.input_norm.",
    ".per_layer_input_gate.": ".own_input.per_layer_input_gate.",
    ".per_layer_projection.": ".own_input.per_layer_projection.",
    ".post_per_layer_input_norm.": ".own_input.post_per_layer_input_norm.",
    "model.embed_tokens_per_layer.": "model.own_inputs.embed_tokens_per_layer.",
    "model.per_layer_model_projection.": "model.own_inputs.per_layer_model_projection.",
    "model.per_layer_projection_norm.": "model.own_inputs.per_layer_projection_norm.",
}


class Gemma4ForCausalLM(CausalLM):
    architectures: tuple[str, ...] = ("Gemma4ForCausalLM",)
    takes_vectors = False
    config_names = {"hidden_activation": "hidden_act"}
    config_defaults: dict[str, Any] = {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": Nullable(512),
        "num_global_key_value_heads": None,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": None,
        "attention_bias": False,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": Nullable(0),
        "sliding_window": 512,
        "layer_types": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": None,
        "vocab_size_per_layer_input": Nullable(262_144),
        "hidden_size_per_layer_input": Nullable(256),
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "tie_word_embeddings": True,
    }
    complete_config: Callable[[Any], None] = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = Gemma4Model(config, max_model_len)
        super().__init__(model, head_of(config, model.embed_tokens))
        self.reason_not_to_divide = config.shape.reason_not_to_divide
        self.checkpoint_map = CheckpointMap(
            merged=MERGED,
            prefixes={"model.language_model.": "model."},
            ignored_modules=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
            convert=partial(convert, config.shape),
            converts_quantized=True,
        )
        self.cap = config.final_logit_softcapping
        if self.cap is not None:
            self.register_buffer("cap_V", constant(self.cap, config.vocab_size), persistent=False)
            self.register_buffer("per_cap_V", constant(1 / self.cap, config.vocab_size), persistent=False)
        self.tanh = activation("tanh")

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        return logits if self.cap is None else self.tanh(logits * self.per_cap_V) * self.cap_V


MODEL = Gemma4ForCausalLM
