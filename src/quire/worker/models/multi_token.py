"""The head that some models come with to guess the token behind the next one (MTP): where it lies, and of what it is.

    state of a token, embedding of the one after it -> norms -> fc -> a decoder layer -> norm -> the model's own head

It is not a part of the model: who drafts with it builds it (`speculative/mtp.py`). Embedding and head are the model's,
of which checkpoints may hold copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quire.messages import DRAFT_PREFIX
from quire.worker.layers import ReplicatedLinear, RotaryEmbedding
from quire.worker.layers.rotary import rotary_of_layers
from quire.worker.models.llama import (
    LlamaDecoderLayer,
    MakeAttention,
    MakeMLP,
    MakeNorm,
    make_norm,
)


@dataclass(frozen=True)
class MultiToken:
    """What differs from model to model."""

    make_attention: MakeAttention
    make_mlp: MakeMLP
    # beginning of its names in the checkpoint, out of the configuration
    prefix: Callable[[Any], str]
    # beginning of a name behind that -> what stands there here
    parts: Mapping[str, str]
    # copies of what the model has
    copies: tuple[str, ...] = ()
    make_norm: MakeNorm = make_norm
    # its own passes take what its last norm leaves, and not what goes in there
    feeds_normed: bool = False
    # behind its layer stands the model's last norm
    shares_norm: bool = False
    is_interleaved: Callable[[Any], bool] = field(default=lambda config: False)
    # the layer of the model whose kind its attention is of, where these differ
    like_layer: Callable[[Any], int] | None = None

    def prefixes(self, config: Any) -> dict[str, str]:
        """As a CheckpointMap has them."""
        first = self.prefix(config)
        return {f"{first}{part}": name for part, name in self.parts.items()}


class MultiTokenHead(nn.Module):
    """Of a model; the first one, where there are several."""

    # the model's
    embed_tokens = None
    lm_head = None

    def __init__(self, config: Any, max_model_len: int, kind: MultiToken) -> None:
        super().__init__()
        size = config.hidden_size
        self.target_width = size
        self.feeds_normed = kind.feeds_normed
        is_interleaved = kind.is_interleaved(config)
        # behind the last one, as its authors count
        index = config.num_hidden_layers
        if kind.like_layer is None:
            rotary = RotaryEmbedding.from_config(config, max_model_len, is_interleaved=is_interleaved)
        else:
            index = kind.like_layer(config)
            rotary = rotary_of_layers(config, max_model_len, is_interleaved=is_interleaved)[index]
        attention = kind.make_attention(config, index, f"{DRAFT_PREFIX}layers.0.self_attn", rotary)
        self.embedding_norm = kind.make_norm(config)
        self.hidden_norm = kind.make_norm(config)
        self.fc = ReplicatedLinear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(config, attention, kind.make_mlp(config, index), kind.make_norm)]
        )
        self.norm: nn.Module | None = None if kind.shares_norm else kind.make_norm(config)

    def share_norm(self, norm: nn.Module) -> None:
        """The model's, whose weights are loaded."""
        self.norm = norm

    def forward(self, embedded_TE: Tensor, positions_T: Tensor, hidden_TE: Tensor) -> Tensor:
        both = torch.cat((self.embedding_norm(embedded_TE), self.hidden_norm(hidden_TE)), dim=-1)
        hidden, residual = self.layers[0](positions_T, self.fc(both), None)
        summed: Tensor = hidden + residual
        return self._normed(summed) if self.feeds_normed else summed

    def normed(self, hidden_NE: Tensor) -> Tensor:
        """As the head of the model takes it."""
        return hidden_NE if self.feeds_normed else self._normed(hidden_NE)

    def _normed(self, hidden: Tensor) -> Tensor:
        assert self.norm is not None
        normed: Tensor = self.norm(hidden)
        return normed
