"""BERT, and what RoBERTa shares with it: tokens see each other, and a norm follows each branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.attention import Attention
from quire.worker.layers import (
    ColumnParallelLinear,
    Embedding,
    LayerNorm,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabEmbedding,
    activation,
)
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.models.encoder import Encoder, num_labels_of


class BertEmbeddings(nn.Module):
    def __init__(self, config: Any, position_offset: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = VocabEmbedding(config.vocab_size, size)
        self.position_embeddings = Embedding(config.max_position_embeddings, size)
        self.token_type_embeddings = Embedding(config.type_vocab_size, size)
        self.LayerNorm = LayerNorm(size, config.layer_norm_eps)
        self.position_offset = position_offset
        self.last_segment = config.type_vocab_size - 1

    def forward(self, input_ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        kinds = self.token_type_embeddings(segments.clamp(max=self.last_segment))
        places = self.position_embeddings(positions + self.position_offset)
        return self.LayerNorm(self.word_embeddings(input_ids) + kinds + places)


class BertAttention(nn.Module):
    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        size = config.hidden_size
        head_dim = size // config.num_attention_heads
        self.qkv_proj = QKVParallelLinear(size, head_dim, config.num_attention_heads, config.num_attention_heads)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            head_dim**-0.5,
            name=f"{name}.attn",
            is_causal=False,
        )
        self.output = BertOutput(config, size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.attn(*self.qkv_proj(hidden)), hidden)


class BertOutput(nn.Module):
    def __init__(self, config: Any, inner_size: int) -> None:
        super().__init__()
        self.dense = RowParallelLinear(inner_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, branch: Tensor, hidden: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(branch) + hidden)


class BertIntermediate(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = ColumnParallelLinear(config.hidden_size, config.intermediate_size)
        self.act = activation(config.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.act(self.dense(hidden))


class BertLayer(nn.Module):
    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        self.attention = BertAttention(config, f"{name}.attention")
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, config.intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.attention(hidden)
        return self.output(self.intermediate(hidden), hidden)


class BertModel(nn.Module):
    def __init__(self, config: Any, position_offset: int = 0) -> None:
        """`position_offset`: rows of the table of positions that stand before that of the first token."""
        super().__init__()
        if position_offset >= config.max_position_embeddings:
            raise ModelError(
                f"config.json: pad_token_id={position_offset - 1}: positions are counted from behind it, and "
                f"max_position_embeddings={config.max_position_embeddings} leaves none. Take the config.json that "
                "belongs to the weights."
            )
        self.embeddings = BertEmbeddings(config, position_offset)
        self.layers = nn.ModuleList(
            BertLayer(config, f"model.layers.{index}") for index in range(config.num_hidden_layers)
        )

    def forward(self, input_ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        hidden = self.embeddings(input_ids, positions, segments)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def bert_map(prefix: str, *ignored_modules: str, **heads: str) -> CheckpointMap:
    """`prefix`: of the backbone, where it has one; `heads`: beginnings of other names, and what stands there here."""
    return CheckpointMap(
        merged={"query": ("qkv_proj", "q"), "key": ("qkv_proj", "k"), "value": ("qkv_proj", "v")},
        prefixes={
            **{f"{name}.": f"{other}." for name, other in heads.items()},
            f"{prefix}.encoder.layer.": "model.layers.",
            f"{prefix}.": "model.",
            "encoder.layer.": "model.layers.",
            "embeddings.": "model.embeddings.",
        },
        # `attention.self` holds the projections alone; gamma and beta are old names
        modules={"gamma": "weight", "beta": "bias"},
        ignored=(".position_ids", ".token_type_ids"),
        ignored_modules=ignored_modules,
        convert=_without_self,
        converts_quantized=True,
    )


def _without_self(name: str, weight: Any) -> list[tuple[str, Any]]:
    return [(name.replace(".attention.self.", ".attention."), weight)]


CONFIG_DEFAULTS = {
    "vocab_size": 30_522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def check_is_encoder(config: Any) -> None:
    """Old files say how positions are counted; newer ones know one way alone."""
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise ModelError(f"config.json: position_embedding_type={kind!r}: only absolute positions are built.")
    if getattr(config, "is_decoder", False):
        raise ModelError("config.json: is_decoder=true: these models are served as encoders alone.")


class BertEncoder(Encoder):
    architectures: tuple[str, ...] = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
    checkpoint_map = bert_map("bert", "cls.", "bert.pooler.", "pooler.")
    config_defaults = CONFIG_DEFAULTS
    complete_config = staticmethod(check_is_encoder)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(BertModel(config))


class BertClassifier(BertEncoder):
    """What the state of the first token says of the whole text."""

    architectures = ("BertForSequenceClassification",)
    checkpoint_map = bert_map("bert", **{"bert.pooler": "pooler"})

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.pooler = nn.ModuleDict({"dense": ReplicatedLinear(config.hidden_size, config.hidden_size)})
        self.classifier = ReplicatedLinear(config.hidden_size, num_labels_of(config))

    def classify(self, pooled: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.tanh(self.pooler["dense"](pooled)))
        return logits


MODEL = BertEncoder
CLASSIFIER = BertClassifier
