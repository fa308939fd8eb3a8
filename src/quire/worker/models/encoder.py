"""Models that see a text as a whole: hidden states of all its tokens, and perhaps labels; never a next token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    """A backbone under `model` that turns (input_ids, positions, segments) into hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, positions: Tensor, segments: Tensor | None = None) -> Tensor:
        """[T, hidden_size]. `segments`: 1 for tokens of the second of two texts; none: all are of the first."""
        if segments is None:
            segments = torch.zeros_like(input_ids)
        hidden: Tensor = self.model(input_ids, positions, segments)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Nobody samples; whoever measures memory gets rows that are no larger than hidden states."""
        return hidden


def num_labels_of(config: Any) -> int:
    """As Transformers counts them: two where nothing is said."""
    labels = getattr(config, "id2label", None)
    if labels:
        return len(labels)
    return int(getattr(config, "num_labels", None) or 2)
