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
        num_tokens = len(x_tC)
        sum_Ct = torch.zeros_like(inputs_Cu[:, :num_tokens], dtype=torch.float32)
        if bias_C is not None:
            sum_Ct += bias_C.float().unsqueeze(1)
        for w in range(width):
            sum_Ct = sum_Ct + inputs_Cu[:, w : w + num_tokens].float() * weight_CW[:, w : w + 1].float()
        out_TC[starts[s] : starts[s + 1]] = (F.silu(sum_Ct) if has_silu else sum_Ct).T.to(out_TC.dtype)
        window_SCW[s] = inputs_Cu[:, num_kept - 1 : num_kept - 1 + width].clone()
