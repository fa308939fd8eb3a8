"""The recurrence of the first Mamba: each channel has a state of its own, whose numbers decay at rates of their own.

    dt = softplus(dt + dt_bias)
    S  = exp(-dt exp(A_log)) S + dt x B        out = S C + D x

In plain PyTorch, token by token and in float32, so that no bit depends on how a prompt is cut.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.worker.layers.parameter import make_parameter
from quire.worker.state_cache import RecurrentLayer, StateTensor, TokenSpans


class SelectiveScan(RecurrentLayer):
    """Suffixes: D channels, N numbers of a state."""

    def __init__(self, channels: int, state_size: int, *, name: str) -> None:
        super().__init__(name, {"memory": StateTensor((channels, state_size), torch.float32)})
        self.A_log = make_parameter(channels, state_size, dtype=torch.float32)
        self.dt_bias = make_parameter(channels, dtype=torch.float32)
        self.D = make_parameter(channels, dtype=torch.float32)

    def forward(self, x_TD: Tensor, dt_TD: Tensor, b_TN: Tensor, c_TN: Tensor) -> Tensor:
        return self.run([x_TD, dt_TD, b_TN, c_TN], x_TD.new_empty(x_TD.shape))

    def compute(self, states: dict[str, Tensor], inputs: list[Tensor], out: Tensor, spans: TokenSpans) -> None:
        x_TD, dt_TD, b_TN, c_TN = inputs
        rate_DN = -self.A_log.exp()
        starts, kept = spans.on_host.query_starts_S1, spans.on_host.num_kept_S
        is_read_S = spans.num_read_S > 0
        for s in range(len(kept)):
            memory_DN = states["memory"][s].clone()
            for index, token in enumerate(range(starts[s], starts[s + 1])):
                dt_D1 = F.softplus(dt_TD[token] + self.dt_bias).unsqueeze(-1)
                input_DN = dt_D1 * x_TD[token].unsqueeze(-1) * b_TN[token]
                absorbed_DN = (dt_D1 * rate_DN).exp() * memory_DN + input_DN
                # only of a first token the device alone knows whether it is in there already
                memory_DN = torch.where(is_read_S[s], memory_DN, absorbed_DN) if index == 0 else absorbed_DN
                out[token] = (memory_DN * c_TN[token]).sum(-1) + self.D * x_TD[token]
                if index == kept[s] - 1:
                    states["memory"][s] = memory_DN
