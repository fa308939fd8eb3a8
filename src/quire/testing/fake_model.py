"""A model without weights or attention: the next token's logits are a row of a table. For tests of the worker.

Everything about it can be computed by hand, so a test states what must come out instead of comparing two runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class FakeModel(nn.Module):
    """Logits after a token at a position are table[(token + position) % len(table)], exactly as they stand there."""

    def __init__(self, table_PV: Tensor) -> None:
        super().__init__()
        self.register_buffer("table_PV", table_PV.float())
        self.num_forwards = 0

    @classmethod
    def random(cls, vocab_size: int, *, seed: int = 0, num_rows: int = 97) -> FakeModel:
        """Different logits for every sum of token and position."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(num_rows, vocab_size, generator=generator) * 2)

    @classmethod
    def constant(cls, logits: Sequence[float]) -> FakeModel:
        """The same logits always."""
        return cls(torch.tensor([list(logits)]))

    @property
    def vocab_size(self) -> int:
        return int(self.table_PV.shape[1])

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        input_embeds: Tensor | None = None,
        intermediate_tensors: Any = None,
    ) -> Tensor:
        self.num_forwards += 1
        return torch.stack([input_ids, positions], dim=1).float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.table_PV[hidden.sum(1).long() % len(self.table_PV)]

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """What the model says after these tokens."""
        return self.table_PV[(tokens[-1] + len(tokens) - 1) % len(self.table_PV)].clone()

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The most probable continuation."""
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(self.logits_after(tokens).argmax()))
        return tokens[len(tokens) - count :]
