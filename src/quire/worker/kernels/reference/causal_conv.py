"""A short convolution over the tokens of a sequence, each channel by itself.

    out[t, c] = bias[c] + weight[c, 0] * x[t - W + 1, c] + ... + weight[c, W - 1] * x[t, c]        then SiLU, if asked

The state is the window of the last W inputs, the newest last: one more than the next token needs, so that the last
token can be computed once more (worker/state_cache.py). Sums in float32, in the order of the window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    window_SCW: Tensor,
    query_starts_S1: Tensor,
    num_kept_S: Tensor,
    num_read_S: Tensor,
    out_TC: Tensor,
    has_silu: bool,
) -> None:
    width = weight_CW.shape[1]
    starts = query_starts_S1.tolist()
    for s, (num_kept, num_read) in enumerate(zip(num_kept_S.tolist(), num_read_S.tolist(), strict=True)):
        x_tC = x_TC[starts[s] : starts[s + 1]]
        # Whether the first token is in the window already or follows it: its window begins at the first column.
        inputs_Cu = torch.cat([window_SCW[s, :, 1 - num_read :], x_tC[num_read:].T], dim=1)
        for i in range(len(x_tC)):  # token by token: how many are computed at once must not change how it is done
            sum_C = torch.zeros_like(inputs_Cu[:, 0], dtype=torch.float32) if bias_C is None else bias_C.float()
            for w in range(width):
                sum_C = sum_C + inputs_Cu[:, i + w].float() * weight_CW[:, w].float()
            out_TC[starts[s] + i] = F.silu(sum_C) if has_silu else sum_C
        window_SCW[s] = inputs_Cu[:, num_kept - 1 : num_kept - 1 + width].clone()
