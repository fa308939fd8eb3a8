"""ModernBERT: norms before branches, rotary positions, gates, and windows in most layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.attention import Attention
from quire.worker.layers import (
    GatedMLP,
    LayerNorm,
    QKVParallelLinear,
    ReplicatedLinear,
    RotaryEmbedding,
    RowParallelLinear,
    VocabEmbedding,
    activation,
)
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.encoder import Encoder, num_labels_of

_LOCAL = "sliding_attention"
_GLOBAL = "full_attention"
# kind of layer -> the older name of its angles' base, and the base where nothing is said
_THETAS = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}


def _norm(config: Any) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)


class ModernBertAttention(nn.Module):
    def __init__(self, config: Any, name: str, kind: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = size // config.num_attention_heads
        self.rotary = rotary
        num_heads = config.num_attention_heads
        self.qkv_proj = QKVParallelLinear(size, self.head_dim, num_heads, num_heads, bias=config.attention_bias)
        self.Wo = RowParallelLinear(size, size, bias=config.attention_bias)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5,
            name=f"{name}.attn",
            # half of it to each side, and the token itself
            sliding_window=config.local_attention // 2 + 1 if kind == _LOCAL else 0,
            is_causal=False,
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        self.rotary(positions, query, key, self.head_dim)
        return self.Wo(self.attn(query, key, value))


class ModernBertLayer(nn.Module):
    def __init__(self, config: Any, index: int, kind: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        # what goes into the first layer has just passed a norm
        self.attn_norm = _norm(config) if index else nn.Identity()
        self.attn = ModernBertAttention(config, f"model.layers.{index}.attn", kind, rotary)
        self.mlp_norm = _norm(config)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_activation, bias=config.mlp_bias
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(positions, self.attn_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class ModernBertModel(nn.Module):
    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {"tok_embeddings": VocabEmbedding(config.vocab_size, config.hidden_size), "norm": _norm(config)}
        )
        rotaries = {
            kind: RotaryEmbedding.from_config(_OfKind(config, kind), max_model_len) for kind in set(config.layer_types)
        }
        self.layers = nn.ModuleList(
            ModernBertLayer(config, index, kind, rotaries[kind]) for index, kind in enumerate(config.layer_types)
        )
        self.final_norm = _norm(config)

    def forward(self, input_ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        hidden = self.embeddings["norm"](self.embeddings["tok_embeddings"](input_ids))
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return self.final_norm(hidden)


class _OfKind:
    """A configuration as layers of one kind see it: with their angles."""

    def __init__(self, config: Any, kind: str) -> None:
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.max_position_embeddings = config.max_position_embeddings
        older_name, theta = _THETAS[kind]
        given = (getattr(config, "rope_parameters", None) or {}).get(kind) or {}
        theta = getattr(config, older_name, None) or theta
        self.rope_parameters = {"rope_type": "default", "rope_theta": theta, **given}


def complete_layer_types(config: Any) -> None:
    """Older files say how often a layer sees everything."""
    if config.layer_types is None:
        every = getattr(config, "global_attn_every_n_layers", None) or 3
        config.layer_types = [_LOCAL if index % every else _GLOBAL for index in range(config.num_hidden_layers)]
    unknown = set(config.layer_types) - _THETAS.keys()
    if unknown:
        raise ModelError(f"config.json: layer_types: {', '.join(sorted(map(str, unknown)))} are not built.")


def apart(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Query, key and value come in one, and gate and up."""
    for module, parts in (("Wqkv", ("q_proj", "k_proj", "v_proj")), ("Wi", ("gate_proj", "up_proj"))):
        if f".{module}." in name:
            pieces = tensor.chunk(len(parts))
            return [(name.replace(module, part), piece) for part, piece in zip(parts, pieces, strict=True)]
    return [(name.replace(".mlp.Wo.", ".mlp.down_proj."), tensor)]


def _map(*ignored_modules: str) -> CheckpointMap:
    return CheckpointMap(
        merged=MERGED,
        prefixes={f"{part}.": f"model.{part}." for part in ("embeddings", "layers", "final_norm")},
        ignored_modules=ignored_modules,
        convert=apart,
    )


class ModernBertEncoder(Encoder):
    architectures: tuple[str, ...] = ("ModernBertModel", "ModernBertForMaskedLM")
    checkpoint_map = _map("head.", "decoder.")
    config_defaults = {
        "vocab_size": 50_368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "local_attention": 128,
        "layer_types": None,
        "classifier_bias": False,
        "classifier_activation": "gelu",
    }
    complete_config = staticmethod(complete_layer_types)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(ModernBertModel(config, max_model_len))


class ModernBertClassifier(ModernBertEncoder):
    architectures = ("ModernBertForSequenceClassification",)
    checkpoint_map = _map()

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        size = config.hidden_size
        self.head = nn.ModuleDict(
            {"dense": ReplicatedLinear(size, size, bias=config.classifier_bias), "norm": _norm(config)}
        )
        self.act = activation(config.classifier_activation)
        self.classifier = ReplicatedLinear(size, num_labels_of(config))

    def classify(self, pooled: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.head["norm"](self.act(self.head["dense"](pooled))))
        return logits


MODEL = ModernBertEncoder
CLASSIFIER = ModernBertClassifier
