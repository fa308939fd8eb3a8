"""Queries that grow with their position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.worker import kernels


class QueryTemperature(nn.Module):
    """The later a query stands, the larger it is, so that attention over a long text stays sharp: a step after every
    `period` positions, the first of which is number `first`."""

    factors_P1: Tensor

    def __init__(self, weight: float, period: float, num_positions: int, *, first: int = 0) -> None:
        super().__init__()
        periods = torch.floor(torch.arange(first, first + num_positions, dtype=torch.float32) / period)
        self.register_buffer("factors_P1", (torch.log1p(periods) * weight + 1.0)[:, None], persistent=False)

    def forward(self, positions: Tensor, query: Tensor) -> Tensor:
        return kernels.weigh_experts(query.unsqueeze(1), F.embedding(positions, self.factors_P1))
