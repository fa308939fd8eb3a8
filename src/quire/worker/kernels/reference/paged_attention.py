"""Attention over a paged KV cache (section 3.4 of the thesis; one call for any mix of query lengths, 4.4).

    sequence s owns the query rows  query_starts[s] : query_starts[s + 1]
    its last row has the position   seq_lens[s] - 1, the one before seq_lens[s] - 2, ...
    key position p lies in          cache[block_tables[s, p // block_size], :, p % block_size]
    a query at position q sees      q - sliding_window < p <= q     (all p <= q if sliding_window is 0),
    or, where it is chunked,        those p <= q that are in q's chunk of sliding_window positions
    with ends                       p < ends[row] takes the place of p <= q; q < ends[row] <= seq_lens[s], and the ends
                                    of a sequence do not fall

Rows from query_starts[S] on belong to nobody: they pad the step, and what `out_THE` holds there has no meaning.
Block ids outside of what a sequence's rows can see are never used: they may be stale or out of range. Nor is what
lies in the cache there: it may be NaN. Where `v_cache` is `k_cache`, a value is the beginning of its key, as long as a
row of `out_THE`. Scores, softmax and the sum over values are float32 throughout, also where the cache holds another
type than query and output (`cache_format.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels.cache_format import decoded


def paged_attention(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_starts_S1: Tensor,
    out_THE: Tensor,
    sinks_H: Tensor | None,
    ends_T: Tensor | None,
    scale: float,
    sliding_window: int,
    is_chunked: bool,
    soft_cap: float,
) -> None:
    """Fill `out_THE`. Heads h * g ... h * g + g - 1 of the query share head h of the cache, g = H // K."""
    softmax = (sinks_H, scale, soft_cap)
    window = (sliding_window, is_chunked)
    if query_THD.shape[0] == block_tables_SM.shape[0]:
        # As many rows as sequences: a step of single tokens. All at once, and no length is needed on the host.
        _attend_row_by_row(
            query_THD, k_cache, v_cache, block_tables_SM, seq_lens_S, query_starts_S1, out_THE, ends_T, softmax, window
        )
        return
    block_size = k_cache.shape[2]
    starts = query_starts_S1.tolist()
    for s, seq_len in enumerate(seq_lens_S.tolist()):
        rows = slice(starts[s], starts[s + 1])
        num_rows = rows.stop - rows.start
        if num_rows == 0:
            continue
        first_position = seq_len - num_rows
        first_block = first_visible(first_position, sliding_window, is_chunked) // block_size
        blocks_M = block_tables_SM[s, first_block : (seq_len + block_size - 1) // block_size]
        row_Q = torch.arange(first_position, seq_len, device=query_THD.device)
        column_P = first_block * block_size + torch.arange(blocks_M.shape[0] * block_size, device=query_THD.device)
        end_Q = row_Q + 1 if ends_T is None else ends_T[rows]
        visible_1QP = _visible(row_Q[None], end_Q[None], column_P, window)
        result_1QHE = _attend(query_THD[None, rows], k_cache, v_cache, blocks_M[None], visible_1QP, softmax)
        out_THE[rows] = result_1QHE[0, ..., : out_THE.shape[2]]


def _attend_row_by_row(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_starts_S1: Tensor,
    out_THE: Tensor,
    ends_T: Tensor | None,
    softmax: tuple[Tensor | None, float, float],
    window: tuple[int, bool],
) -> None:
    """Each row with a copy of its own of all keys: right for every mix of lengths, good if all lengths are 1."""
    row_T = torch.arange(query_THD.shape[0], device=query_THD.device)
    owner_T = (torch.searchsorted(query_starts_S1.long(), row_T, right=True) - 1).clamp(max=seq_lens_S.shape[0] - 1)
    position_T = seq_lens_S[owner_T] - query_starts_S1[owner_T + 1] + row_T
    end_T = position_T + 1 if ends_T is None else ends_T
    # rows that pad the step see nothing
    is_padding_T = row_T >= query_starts_S1[-1]
    position_T = torch.where(is_padding_T, -1, position_T)
    end_T = torch.where(is_padding_T, 0, end_T)
    block_size = k_cache.shape[2]
    column_P = torch.arange(block_tables_SM.shape[1] * block_size, device=query_THD.device)
    visible_T1P = _visible(position_T[:, None], end_T[:, None], column_P, window)
    is_used_TM = visible_T1P[:, 0].unflatten(1, (-1, block_size)).any(-1)
    blocks_TM = torch.where(is_used_TM, block_tables_SM[owner_T], 0)
    result_T1HE = _attend(query_THD[:, None], k_cache, v_cache, blocks_TM, visible_T1P, softmax)
    out_THE.copy_(result_T1HE[:, 0, :, : out_THE.shape[2]])


def first_visible(position: int, sliding_window: int, is_chunked: bool) -> int:
    """The first position that one sees."""
    if sliding_window <= 0:
        return 0
    return position // sliding_window * sliding_window if is_chunked else max(0, position - sliding_window + 1)


def _visible(row_SQ: Tensor, end_SQ: Tensor, column_P: Tensor, window: tuple[int, bool]) -> Tensor:
    """Which key positions (columns) a query position (row) sees: [S, Q, P]."""
    sliding_window, is_chunked = window
    distance_SQP = row_SQ[:, :, None] - column_P
    visible_SQP = column_P < end_SQ[:, :, None]
    if sliding_window <= 0:
        return visible_SQP
    if is_chunked:
        return visible_SQP & (row_SQ[:, :, None] // sliding_window == column_P // sliding_window)
    return visible_SQP & (distance_SQP < sliding_window)


def _attend(
    query_SQHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks_SM: Tensor,
    visible_SQP: Tensor,
    softmax: tuple[Tensor | None, float, float],
) -> Tensor:
    """Dense attention of S equally long pieces, each over its own blocks; the result is float32 [S, Q, H, E]."""
    sinks_H, scale, soft_cap = softmax
    num_heads, num_kv_heads = query_SQHD.shape[2], k_cache.shape[1]
    key_SKPD = decoded(k_cache, blocks_SM).transpose(1, 2).flatten(2, 3)
    value_SKPE = decoded(v_cache, blocks_SM).transpose(1, 2).flatten(2, 3)
    # 0 * NaN is NaN, so a weight of zero does not keep out what nobody wrote.
    value_SKPE = value_SKPE.masked_fill(~visible_SQP.any(1)[:, None, :, None], 0.0)
    query_SQKGD = query_SQHD.float().unflatten(2, (num_kv_heads, num_heads // num_kv_heads))
    score_SKGQP = torch.einsum("sqkgd,skpd->skgqp", query_SQKGD, key_SKPD) * scale
    if soft_cap > 0:
        score_SKGQP = soft_cap * torch.tanh(score_SKGQP / soft_cap)
    score_SKGQP = score_SKGQP.masked_fill(~visible_SQP[:, None, None], float("-inf"))
    # A row that sees nothing (padding) becomes zero: its maximum is -inf, and -inf - -inf would be NaN.
    maximum_SKGQ1 = score_SKGQP.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    if sinks_H is not None:
        sink_KG11 = sinks_H.float().view(num_kv_heads, -1, 1, 1)
        maximum_SKGQ1 = torch.maximum(maximum_SKGQ1, sink_KG11)
    weight_SKGQP = torch.exp(score_SKGQP - maximum_SKGQ1)
    total_SKGQ1 = weight_SKGQP.sum(-1, keepdim=True)
    if sinks_H is not None:  # one more logit in the denominator, without a value
        total_SKGQ1 = total_SKGQ1 + torch.exp(sink_KG11 - maximum_SKGQ1)
    weight_SKGQP = weight_SKGQP / total_SKGQ1.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.einsum("skgqp,skpe->sqkge", weight_SKGQP, value_SKPE).flatten(2, 3)
