"""Layers that keep a state of each sequence: a short convolution, the gated delta rule, the scan of Mamba 2.

Each is a RecurrentLayer (`state_cache.py`): the tensors that it keeps, and one kernel. What is kept, and what a kernel
computes, is float32, whatever the model's type is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.worker import kernels
from quire.worker.layers.parameter import make_parameter
from quire.worker.state_cache import RecurrentLayer, StateTensor, TokenSpans


class CausalConv(RecurrentLayer):
    """A short convolution over the tokens of each sequence, each channel by itself.

    Its weight is [channels, 1, width], as checkpoints write that of a Conv1d.
    """

    def __init__(self, channels: int, width: int, *, name: str, bias: bool, activation: str | None = None) -> None:
        super().__init__(name, {"window": StateTensor((channels, width), torch.float32)})
        if activation not in (None, "silu"):
            raise ValueError(f"{name}: activation={activation!r}: must be None or 'silu'")
        self.has_silu = activation is not None
        self.weight = make_parameter(channels, 1, width)
        self.bias = make_parameter(channels) if bias else None

    def forward(self, x_TC: Tensor) -> Tensor:
        return self.run([x_TC], torch.empty_like(x_TC, memory_format=torch.contiguous_format))

    def compute(self, states: dict[str, Tensor], inputs: list[Tensor], out: Tensor, spans: TokenSpans) -> None:
        [x_TC] = inputs
        kernels.causal_conv(
            x_TC,
            self.weight.squeeze(1).float(),
            None if self.bias is None else self.bias.float(),
            states["window"],
            spans.query_starts_S1,
            spans.num_kept_S,
            spans.num_read_S,
            out,
            has_silu=self.has_silu,
        )


class GatedDeltaRule(RecurrentLayer):
    """The recurrence of Gated DeltaNet, with the two numbers a head that say how fast it forgets."""

    def __init__(self, num_value_heads: int, key_dim: int, value_dim: int, *, name: str) -> None:
        super().__init__(name, {"memory": StateTensor((num_value_heads, key_dim, value_dim), torch.float32)})
        self.A_log = make_parameter(num_value_heads)
        self.dt_bias = make_parameter(num_value_heads)

    def forward(self, query_THK: Tensor, key_THK: Tensor, value_TVE: Tensor, a_TV: Tensor, b_TV: Tensor) -> Tensor:
        out_TVE = torch.empty_like(value_TVE, memory_format=torch.contiguous_format)
        return self.run([query_THK, key_THK, value_TVE, a_TV, b_TV], out_TVE)

    def compute(self, states: dict[str, Tensor], inputs: list[Tensor], out: Tensor, spans: TokenSpans) -> None:
        query_THK, key_THK, value_TVE, a_TV, b_TV = inputs
        kernels.gated_delta_rule(
            query_THK,
            key_THK,
            value_TVE,
            a_TV,
            b_TV,
            self.A_log.float(),
            self.dt_bias.float(),
            states["memory"],
            spans.query_starts_S1,
            spans.num_kept_S,
            spans.num_read_S,
            out,
        )


class StateSpaceScan(RecurrentLayer):
    """The recurrence of Mamba 2, with its numbers of each head. Limits are those of a time step."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        state_size: int,
        *,
        name: str,
        limits: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__(name, {"memory": StateTensor((num_heads, head_dim, state_size), torch.float32)})
        self.limits = limits
        self.dt_bias = make_parameter(num_heads)
        self.A_log = make_parameter(num_heads)
        self.D = make_parameter(num_heads)

    def forward(self, x_THP: Tensor, dt_TH: Tensor, b_TGN: Tensor, c_TGN: Tensor) -> Tensor:
        return self.run([x_THP, dt_TH, b_TGN, c_TGN], torch.empty_like(x_THP, memory_format=torch.contiguous_format))

    def compute(self, states: dict[str, Tensor], inputs: list[Tensor], out: Tensor, spans: TokenSpans) -> None:
        x_THP, dt_TH, b_TGN, c_TGN = inputs
        least_dt, most_dt = self.limits
        kernels.ssd_scan(
            x_THP,
            dt_TH,
            self.dt_bias.float(),
            self.A_log.float(),
            b_TGN,
            c_TGN,
            self.D.float(),
            states["memory"],
            spans.query_starts_S1,
            spans.num_kept_S,
            spans.num_read_S,
            out,
            least_dt=least_dt,
            most_dt=most_dt,
        )
