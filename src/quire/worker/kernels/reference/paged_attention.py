"""Attention over a paged KV cache (section 3.4 of the thesis; one call for any mix of query lengths, 4.4).

    sequence s owns the query rows  query_starts[s] : query_starts[s + 1]
    its last row has the position   seq_lens[s] - 1, the one before seq_lens[s] - 2, ...
    key position p lies in          cache[block_tables[s, p // block_size], :, p % block_size]
    a query at position q sees      q - sliding_window < p <= q     (all p <= q if sliding_window is 0),
    or, where it is chunked,        those p <= q that are in q's chunk of sliding_window positions
    with slopes (ALiBi)             slope[h] * p is added to the score of p: that every score of a row has the same
                                    slope[h] * q too much makes no difference to a softmax, but that scores are
                                    rounded as numbers of that size
    with bias (relative positions)  bias[h, q - p] is added to the score of p, and the last of bias[h] where that has no
                                    number for the distance
    with begins                     p >= begins[s] is seen alone
    with ends                       p < ends[row] takes the place of p <= q; q < ends[row] <= seq_lens[s], and the ends
                                    of a sequence do not fall

Rows from query_starts[S] on belong to nobody: they pad the step, and what `out_THE` holds there has no meaning.
Block ids outside of what a sequence's rows can see are never used: they may be stale or out of range. Nor is what
lies in the cache there: it may be NaN. Where `v_cache` is `k_cache`, a value is the beginning of its key, as long as a
row of `out_THE`. Scores, softmax and the sum over values are float32 throughout, also where the cache holds another
type than query and output (`cache_format.py`).

Ranks may share the keys of each sequence: position p is kept by rank p % size, at place p % block_size // size of the
block. So each of them has block_size / size places of every block. What it says of its keys is a part of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.worker.kernels.cache_format import decoded


class _Inputs(NamedTuple):
    query_THD: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables_SM: Tensor
    seq_lens_S: Tensor
    query_starts_S1: Tensor


class _Softmax(NamedTuple):
    sinks_H: Tensor | None
    slopes_H: Tensor | None
    bias_HR: Tensor | None
    scale: float
    soft_cap: float


@dataclass(frozen=True)
class _Keys:
    """Which of them there are, and which of those a row sees."""

    ends_T: Tensor | None
    begins_S: Tensor | None
    sliding_window: int
    is_chunked: bool
    rank: int = 0
    size: int = 1

    def positions(self, first_block: int, num_blocks: int, block_size: int, device: torch.device) -> Tensor:
        """Of the places of some blocks, those that this rank keeps."""
        places = torch.arange(first_block * block_size, (first_block + num_blocks) * block_size, device=device)
        return places * self.size + self.rank

    def visible(self, row_SQ: Tensor, begin_S: Tensor | None, end_SQ: Tensor, column_P: Tensor) -> Tensor:
        """Which key positions (columns) a query position (row) sees: [S, Q, P]."""
        visible_SQP = column_P < end_SQ[:, :, None]
        if begin_S is not None:
            visible_SQP = visible_SQP & (column_P >= begin_S[:, None, None])
        if self.sliding_window <= 0:
            return visible_SQP
        if self.is_chunked:
            return visible_SQP & (row_SQ[:, :, None] // self.sliding_window == column_P // self.sliding_window)
        return visible_SQP & (row_SQ[:, :, None] - column_P < self.sliding_window)


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
    slopes_H: Tensor | None = None,
    begins_S: Tensor | None = None,
    bias_HR: Tensor | None = None,
) -> None:
    """Fill `out_THE`. Heads h * g ... h * g + g - 1 of the query share head h of the cache, g = H // K."""
    inputs = _Inputs(query_THD, k_cache, v_cache, block_tables_SM, seq_lens_S, query_starts_S1)
    keys = _Keys(ends_T, begins_S, sliding_window, is_chunked)
    softmax = _Softmax(sinks_H, slopes_H, bias_HR, scale, soft_cap)
    _attend_all(inputs, out_THE, out_THE.new_empty(out_THE.shape[:2]), softmax, keys)


def attention_part(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_starts_S1: Tensor,
    sinks_H: Tensor | None,
    ends_T: Tensor | None,
    scale: float,
    sliding_window: int,
    is_chunked: bool,
    soft_cap: float,
    value_dim: int,
    rank: int,
    size: int,
    slopes_H: Tensor | None = None,
    begins_S: Tensor | None = None,
    bias_HR: Tensor | None = None,
) -> Tensor:
    """[T, H, value_dim + 1] in float32: the same over the keys of one rank, and the logarithm of each row's sum of
    exponentials, -inf where it sees no key."""
    part_THE = query_THD.new_zeros((*query_THD.shape[:2], value_dim + 1), dtype=torch.float32)
    inputs = _Inputs(query_THD, k_cache, v_cache, block_tables_SM, seq_lens_S, query_starts_S1)
    keys = _Keys(ends_T, begins_S, sliding_window, is_chunked, rank, size)
    softmax = _Softmax(sinks_H, slopes_H, bias_HR, scale, soft_cap)
    _attend_all(inputs, part_THE[..., :-1], part_THE[..., -1], softmax, keys)
    return part_THE


def merge_attention(parts_TPHE: Tensor, out_THE: Tensor) -> None:
    """Attention over the keys of all ranks: their parts, in order, by the share that each has of the sum."""
    log_TPH1 = parts_TPHE[..., -1:]
    top_T1H1 = log_TPH1.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weight_TPH1 = torch.exp(log_TPH1 - top_T1H1)
    total_THE = torch.zeros_like(parts_TPHE[:, 0, :, :-1])
    for number in range(parts_TPHE.shape[1]):
        total_THE = total_THE + weight_TPH1[:, number] * parts_TPHE[:, number, :, :-1]
    sum_TH1 = weight_TPH1.sum(1)
    out_THE.copy_(torch.where(sum_TH1 == 0, 0.0, total_THE / sum_TH1))


def _attend_all(inputs: _Inputs, out_THE: Tensor, logs_TH: Tensor, softmax: _Softmax, keys: _Keys) -> None:
    query_THD, k_cache, _, block_tables_SM, seq_lens_S, query_starts_S1 = inputs
    if query_THD.shape[0] == block_tables_SM.shape[0]:
        # As many rows as sequences: a step of single tokens. All at once, and no length is needed on the host.
        _attend_row_by_row(inputs, out_THE, logs_TH, softmax, keys)
        return
    block_size = k_cache.shape[2]
    block_tokens = block_size * keys.size
    starts = query_starts_S1.tolist()
    for s, seq_len in enumerate(seq_lens_S.tolist()):
        rows = slice(starts[s], starts[s + 1])
        num_rows = rows.stop - rows.start
        if num_rows == 0:
            continue
        first_position = seq_len - num_rows
        first_key = first_visible(first_position, keys.sliding_window, keys.is_chunked)
        begin_1 = None
        if keys.begins_S is not None:
            begin_1 = keys.begins_S[s : s + 1]
            first_key = min(max(first_key, int(begin_1)), seq_len)
        first_block = first_key // block_tokens
        blocks_M = block_tables_SM[s, first_block : (seq_len + block_tokens - 1) // block_tokens]
        row_Q = torch.arange(first_position, seq_len, device=query_THD.device)
        column_P = keys.positions(first_block, blocks_M.shape[0], block_size, query_THD.device)
        end_Q = row_Q + 1 if keys.ends_T is None else keys.ends_T[rows]
        visible_1QP = keys.visible(row_Q[None], begin_1, end_Q[None], column_P)
        distance_1QP = row_Q[None, :, None] - column_P
        result_1QHE, log_1QH = _attend(
            query_THD[None, rows], inputs, blocks_M[None], visible_1QP, column_P, distance_1QP, softmax
        )
        out_THE[rows] = result_1QHE[0, ..., : out_THE.shape[2]].to(out_THE.dtype)
        logs_TH[rows] = log_1QH[0].to(logs_TH.dtype)


def _attend_row_by_row(inputs: _Inputs, out_THE: Tensor, logs_TH: Tensor, softmax: _Softmax, keys: _Keys) -> None:
    """Each row with a copy of its own of all keys: right for every mix of lengths, good if all lengths are 1."""
    query_THD, k_cache, _, block_tables_SM, seq_lens_S, query_starts_S1 = inputs
    row_T = torch.arange(query_THD.shape[0], device=query_THD.device)
    owner_T = (torch.searchsorted(query_starts_S1.long(), row_T, right=True) - 1).clamp(max=seq_lens_S.shape[0] - 1)
    position_T = seq_lens_S[owner_T] - query_starts_S1[owner_T + 1] + row_T
    end_T = position_T + 1 if keys.ends_T is None else keys.ends_T
    # rows that pad the step see nothing
    is_padding_T = row_T >= query_starts_S1[-1]
    position_T = torch.where(is_padding_T, -1, position_T)
    end_T = torch.where(is_padding_T, 0, end_T)
    block_size = k_cache.shape[2]
    column_P = keys.positions(0, block_tables_SM.shape[1], block_size, query_THD.device)
    begin_T = None if keys.begins_S is None else keys.begins_S[owner_T]
    visible_T1P = keys.visible(position_T[:, None], begin_T, end_T[:, None], column_P)
    is_used_TM = visible_T1P[:, 0].unflatten(1, (-1, block_size)).any(-1)
    blocks_TM = torch.where(is_used_TM, block_tables_SM[owner_T], 0)
    distance_T1P = position_T[:, None, None] - column_P
    result_T1HE, log_T1H = _attend(query_THD[:, None], inputs, blocks_TM, visible_T1P, column_P, distance_T1P, softmax)
    out_THE.copy_(result_T1HE[:, 0, :, : out_THE.shape[2]])
    logs_TH.copy_(log_T1H[:, 0])


def first_visible(position: int, sliding_window: int, is_chunked: bool) -> int:
    """The first position that one sees."""
    if sliding_window <= 0:
        return 0
    return position // sliding_window * sliding_window if is_chunked else max(0, position - sliding_window + 1)


def _attend(
    query_SQHD: Tensor,
    inputs: _Inputs,
    blocks_SM: Tensor,
    visible_SQP: Tensor,
    column_P: Tensor,
    distance_SQP: Tensor,
    softmax: _Softmax,
) -> tuple[Tensor, Tensor]:
    """Dense attention of S equally long pieces, each over its own blocks: float32 [S, Q, H, E], and the logarithms of
    the sums of exponentials, [S, Q, H]."""
    sinks_H, slopes_H, bias_HR, scale, soft_cap = softmax
    k_cache, v_cache = inputs.k_cache, inputs.v_cache
    num_heads, num_kv_heads = query_SQHD.shape[2], k_cache.shape[1]
    key_SKPD = decoded(k_cache, blocks_SM).transpose(1, 2).flatten(2, 3)
    value_SKPE = decoded(v_cache, blocks_SM).transpose(1, 2).flatten(2, 3)
    # 0 * NaN is NaN, so a weight of zero does not keep out what nobody wrote.
    value_SKPE = value_SKPE.masked_fill(~visible_SQP.any(1)[:, None, :, None], 0.0)
    query_SQKGD = query_SQHD.float().unflatten(2, (num_kv_heads, num_heads // num_kv_heads))
    score_SKGQP = torch.einsum("sqkgd,skpd->skgqp", query_SQKGD, key_SKPD) * scale
    if soft_cap > 0:
        score_SKGQP = soft_cap * torch.tanh(score_SKGQP / soft_cap)
    if slopes_H is not None:
        score_SKGQP = score_SKGQP + slopes_H.float().view(num_kv_heads, -1, 1, 1) * column_P
    if bias_HR is not None:
        bias_HSQP = bias_HR.float()[:, distance_SQP.clamp(0, bias_HR.shape[1] - 1)]
        score_SKGQP = score_SKGQP + bias_HSQP.transpose(0, 1).unflatten(1, (num_kv_heads, -1))
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
    log_SQH = (maximum_SKGQ1 + total_SKGQ1.log()).squeeze(-1).permute(0, 3, 1, 2).flatten(2, 3)
    weight_SKGQP = weight_SKGQP / total_SKGQ1.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.einsum("skgqp,skpe->sqkge", weight_SKGQP, value_SKPE).flatten(2, 3), log_SQH
