"""A short convolution over the tokens of a sequence, each channel by itself.

    out[t, c] = bias[c] + weight[0, c] * x[t - W + 1, c] + ... + weight[W - 1, c] * x[t, c]        then SiLU, if asked

The state is the window of the last W inputs, the newest last: one more than the next token needs, so that the last
token can be computed once more (worker/state_cache.py). Sums in float32, in the order of the window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.worker.kernels.sequence_states import SequenceStates, bytes_of, floats_of


def causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    places: list[Tensor],
    first_chunk: int,
    tables_Sn: Tensor,
    starts_S: Tensor,
    query_starts_S1: Tensor,
    num_kept_S: Tensor,
    out_TC: Tensor,
    has_silu: bool,
) -> None:
    width = weight_WC.shape[0]
    states = SequenceStates(places, first_chunk, tables_Sn, starts_S, query_starts_S1, num_kept_S)
    buffer, num_read_S = states.gather(bytes_of(*weight_WC.shape))
    window_SWC = floats_of(buffer, *weight_WC.shape)
    starts = query_starts_S1.tolist()
    for s, (num_kept, num_read) in enumerate(zip(num_kept_S.tolist(), num_read_S.tolist(), strict=True)):
        x_tC = x_TC[starts[s] : starts[s + 1]].float()
        # Whether the first token is in the window already or follows it: its window begins at the first row.
        inputs_uC = torch.cat([window_SWC[s, 1 - num_read :], x_tC[num_read:]])
        for i in range(len(x_tC)):  # token by token: how many are computed at once must not change how it is done
            sum_C = torch.zeros_like(inputs_uC[0]) if bias_C is None else bias_C
            for w in range(width):
                sum_C = sum_C + inputs_uC[i + w] * weight_WC[w]
            out_TC[starts[s] + i] = F.silu(sum_C) if has_silu else sum_C
        window_SWC[s] = inputs_uC[num_kept - 1 : num_kept - 1 + width].detach()
    states.scatter(buffer)
