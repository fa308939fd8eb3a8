"""The gated delta rule: a matrix a head, in which keys look values up, and which forgets.

    S = exp(-exp(A_log) softplus(a + dt_bias)) * S        read = S^T k
    S = S + k (sigmoid(b) * (v - read))^T                 out = S^T (q / sqrt(K))

q and k are brought to length 1 first. All in float32, token by token. A head of queries and keys serves V / H heads of
values that stand side by side. Suffixes: H heads of keys, V heads of values, K and E their dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.worker.kernels.sequence_states import SequenceStates, bytes_of, floats_of

_EPS = 1e-6


def gated_delta_rule(
    query_THK: Tensor,
    key_THK: Tensor,
    value_TVE: Tensor,
    a_TV: Tensor,
    b_TV: Tensor,
    a_log_V: Tensor,
    dt_bias_V: Tensor,
    places: list[Tensor],
    first_chunk: int,
    tables_Sn: Tensor,
    starts_S: Tensor,
    query_starts_S1: Tensor,
    num_kept_S: Tensor,
    out_TVE: Tensor,
) -> None:
    shape = value_TVE.shape[1], query_THK.shape[2], value_TVE.shape[2]
    states = SequenceStates(places, first_chunk, tables_Sn, starts_S, query_starts_S1, num_kept_S)
    buffer, num_read_S = states.gather(bytes_of(*shape))
    state_SVKE = floats_of(buffer, *shape)
    num_shared = value_TVE.shape[1] // query_THK.shape[1]
    a_TV = a_TV.float()
    b_TV = b_TV.float()
    query_TVK = _normalised(query_THK).repeat_interleave(num_shared, dim=1) * query_THK.shape[2] ** -0.5
    key_TVK = _normalised(key_THK).repeat_interleave(num_shared, dim=1)
    starts = query_starts_S1.tolist()
    for s, (num_kept, num_read) in enumerate(zip(num_kept_S.tolist(), num_read_S.tolist(), strict=True)):
        state_VKE = state_SVKE[s].clone()
        for index, t in enumerate(range(starts[s], starts[s + 1])):
            if index >= num_read:
                state_VKE = state_VKE * (-a_log_V.exp() * F.softplus(a_TV[t] + dt_bias_V)).exp()[:, None, None]
                read_VE = (state_VKE * key_TVK[t].unsqueeze(-1)).sum(dim=1)
                change_VE = (value_TVE[t] - read_VE) * b_TV[t].sigmoid().unsqueeze(-1)
                state_VKE = state_VKE + key_TVK[t].unsqueeze(-1) * change_VE.unsqueeze(1)
            out_TVE[t] = (state_VKE * query_TVK[t].unsqueeze(-1)).sum(dim=1).to(out_TVE.dtype)
            if index == num_kept - 1:
                state_SVKE[s] = state_VKE.detach()
    states.scatter(buffer)


def _normalised(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _EPS)
