"""The recurrence of Mamba 2: a matrix a head, which decays and takes in one outer product a token.

    dt = softplus(dt + dt_bias), within limits
    S = exp(-dt exp(A_log)) * S + (dt * x) B^T        out = S C + D * x

A group of B and C serves the H / G heads that stand side by side. All in float32, token by
token. Suffixes: H heads, P their dimension, G groups, N the size of a state.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.worker.kernels.sequence_states import SequenceStates, bytes_of, floats_of


def ssd_scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    dt_bias_H: Tensor,
    a_log_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    d_H: Tensor,
    places: list[Tensor],
    first_chunk: int,
    tables_Sn: Tensor,
    starts_S: Tensor,
    query_starts_S1: Tensor,
    num_kept_S: Tensor,
    out_THP: Tensor,
    least_dt: float,
    most_dt: float,
) -> None:
    shape = *x_THP.shape[1:], b_TGN.shape[2]
    states = SequenceStates(places, first_chunk, tables_Sn, starts_S, query_starts_S1, num_kept_S)
    buffer, num_read_S = states.gather(bytes_of(*shape))
    state_SHPN = floats_of(buffer, *shape)
    num_shared = x_THP.shape[1] // b_TGN.shape[1]
    x = x_THP.float()
    dt_TH = dt_TH.float()
    b_THN = b_TGN.float().repeat_interleave(num_shared, dim=1)
    c_THN = c_TGN.float().repeat_interleave(num_shared, dim=1)
    starts = query_starts_S1.tolist()
    for s, (num_kept, num_read) in enumerate(zip(num_kept_S.tolist(), num_read_S.tolist(), strict=True)):
        state_HPN = state_SHPN[s].clone()
        for index, t in enumerate(range(starts[s], starts[s + 1])):
            if index >= num_read:
                dt_H = F.softplus(dt_TH[t] + dt_bias_H).clamp(least_dt, most_dt)
                state_HPN = state_HPN * (-dt_H * a_log_H.exp()).exp()[:, None, None]
                state_HPN = state_HPN + (dt_H.unsqueeze(-1) * x[t]).unsqueeze(-1) * b_THN[t].unsqueeze(1)
            out = (state_HPN * c_THN[t].unsqueeze(1)).sum(dim=-1) + d_H.float().unsqueeze(-1) * x[t]
            out_THP[t] = out.to(out_THP.dtype)
            if index == num_kept - 1:
                state_SHPN[s] = state_HPN.detach()
    states.scatter(buffer)
