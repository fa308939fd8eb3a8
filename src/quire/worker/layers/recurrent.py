"""Layers that keep a state of each sequence: a short convolution, the gated delta rule, the scan of Mamba 2, attention
with a sum in the place of a softmax.

Each is a StatefulLayer (`state_cache.py`): the tensors that it keeps, and one kernel. What is kept, what a kernel
computes, and the few weights of it are float32, whatever the model's type is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quire.worker import kernels
from quire.worker.kernels.sequence_states import SequenceStates
from quire.worker.layers.parameter import Part, make_parameter
from quire.worker.state_cache import StatefulLayer, StateTensor


class CausalConv(StatefulLayer):
    """A short convolution over the tokens of each sequence, each channel by itself.

    Checkpoints write its weight as that of a Conv1d, [channels, 1, width].
    """

    is_kernel = True

    def __init__(self, channels: int, width: int, *, name: str, bias: bool, activation: str | None = None) -> None:
        super().__init__(name, {"window": StateTensor((width, channels), torch.float32)})
        if activation not in (None, "silu"):
            raise ValueError(f"{name}: activation={activation!r}: must be None or 'silu'")
        self.has_silu = activation is not None
        self.weight = make_parameter(width, channels, pick=_channels_last, dtype=torch.float32)
        self.bias = make_parameter(channels, dtype=torch.float32) if bias else None

    def forward(self, x_TC: Tensor) -> Tensor:
        return self.run([x_TC], x_TC.new_empty(x_TC.shape))

    def change(self, states: SequenceStates, inputs: list[Tensor], out: Tensor) -> None:
        [x_TC] = inputs
        kernels.causal_conv(x_TC, self.weight, self.bias, states, out, has_silu=self.has_silu)


def _channels_last(whole: Tensor, weight: Any, part: Part) -> tuple[Tensor, Any]:
    """[channels, 1, width] -> [width, channels]. What has another shape is refused as it is."""
    is_fit = isinstance(weight, Tensor) and weight.shape == (whole.shape[1], 1, whole.shape[0])
    return whole, weight.squeeze(1).T if is_fit else weight


class GatedDeltaRule(StatefulLayer):
    """The recurrence of Gated DeltaNet, with the two numbers a head that say how fast it forgets."""

    is_kernel = True

    def __init__(self, num_value_heads: int, key_dim: int, value_dim: int, *, name: str) -> None:
        super().__init__(name, {"memory": StateTensor((num_value_heads, key_dim, value_dim), torch.float32)})
        self.A_log = make_parameter(num_value_heads, dtype=torch.float32)
        self.dt_bias = make_parameter(num_value_heads, dtype=torch.float32)

    def forward(self, query_THK: Tensor, key_THK: Tensor, value_TVE: Tensor, a_TV: Tensor, b_TV: Tensor) -> Tensor:
        return self.run([query_THK, key_THK, value_TVE, a_TV, b_TV], value_TVE.new_empty(value_TVE.shape))

    def change(self, states: SequenceStates, inputs: list[Tensor], out: Tensor) -> None:
        query_THK, key_THK, value_TVE, a_TV, b_TV = inputs
        kernels.gated_delta_rule(query_THK, key_THK, value_TVE, a_TV, b_TV, self.A_log, self.dt_bias, states, out)


class StateSpaceScan(StatefulLayer):
    """The recurrence of Mamba 2, with its numbers of each head. Limits are those of a time step."""

    is_kernel = True

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
        self.dt_bias = make_parameter(num_heads, dtype=torch.float32)
        self.A_log = make_parameter(num_heads, dtype=torch.float32)
        self.D = make_parameter(num_heads, dtype=torch.float32)

    def forward(self, x_THP: Tensor, dt_TH: Tensor, b_TGN: Tensor, c_TGN: Tensor) -> Tensor:
        return self.run([x_THP, dt_TH, b_TGN, c_TGN], x_THP.new_empty(x_THP.shape))

    def change(self, states: SequenceStates, inputs: list[Tensor], out: Tensor) -> None:
        x_THP, dt_TH, b_TGN, c_TGN = inputs
        least_dt, most_dt = self.limits
        kernels.ssd_scan(
            x_THP,
            dt_TH,
            self.dt_bias,
            self.A_log,
            b_TGN,
            c_TGN,
            self.D,
            states,
            out,
            least_dt=least_dt,
            most_dt=most_dt,
        )


class LinearAttention(StatefulLayer):
    """Attention without a softmax. Each head forgets at a rate of its own: S = exp(-rate) S + v k^T, out = S q.

    That is the recurrence of Mamba 2 with steps of length 1.
    """

    is_kernel = True

    def __init__(self, rates_H: Tensor, head_dim: int, *, name: str) -> None:
        num_heads = len(rates_H)
        super().__init__(name, {"memory": StateTensor((num_heads, head_dim, head_dim), torch.float32)})
        self.rate_logs: Tensor
        self.zeros: Tensor
        self.no_steps: Tensor
        self.register_buffer("rate_logs", rates_H.float().log().to(torch.get_default_device()), persistent=False)
        self.register_buffer("zeros", torch.zeros(num_heads, dtype=torch.float32), persistent=False)
        self.register_buffer("no_steps", torch.zeros(1, num_heads), persistent=False)

    def forward(self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> Tensor:
        return self.run([query_THD, key_THD, value_THD], value_THD.new_empty(value_THD.shape))

    def change(self, states: SequenceStates, inputs: list[Tensor], out: Tensor) -> None:
        query_THD, key_THD, value_THD = inputs
        steps_TH = self.no_steps.expand(len(value_THD), -1)
        kernels.ssd_scan(
            value_THD,
            steps_TH,
            self.zeros,
            self.rate_logs,
            key_THD,
            query_THD,
            self.zeros,
            states,
            out,
            least_dt=1.0,
            most_dt=1.0,
        )
