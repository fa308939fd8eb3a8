"""Draw a token by its weight: where the running sum of weights passes uniform * total.

Sums run in float64 in a fixed order. Without a limit it is the order of token ids. top_k and top_p keep the first few
in the order "weight falling, then token id rising", so that ties are cut the same way every time. A row's token depends
on its own weights and its own number alone, bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.worker.kernels.reference.order import ids_of, order_keys

# Rows are drawn in slices of at most so many logits. On a CPU they stay in the cache; elsewhere top_p sorts a slice,
# which needs some 40 bytes a logit that the KV cache cannot have.
_SLICE_CPU, _SLICE_OTHER = 1 << 21, 1 << 24
# Weights of a chunk of the vocabulary are summed first, then the chunks: a draw reads the whole row once.
_CHUNK = 256
# Spare tokens beyond top_k show whether a tie crosses the limit; if it does, so many times more are looked at.
_SPARE, _GROWTH = 32, 16
# How many tokens a share of top_p needs in most cases; what needs more goes the longer way.
_NUCLEUS = 128


def rows_in_slice(vocab_size: int, device: torch.device) -> int:
    """How many rows are drawn at once at most: what a step needs beyond its logits grows no further."""
    return max(1, (_SLICE_CPU if device.type == "cpu" else _SLICE_OTHER) // vocab_size)


def draw_from_all(weights_nV: Tensor, uniform_n: Tensor) -> Tensor:
    """No limit: by chunks, then within one."""
    chunks_nCc = _chunked(weights_nV)
    sums_nC = chunks_nCc.sum(-1).double().cumsum(-1)
    total_n1 = sums_nC[:, -1:]
    target_n1 = _below(uniform_n[:, None] * total_n1, total_n1)
    chunk_n1 = _first_above(sums_nC, target_n1)
    start_n1 = torch.where(chunk_n1 > 0, sums_nC.gather(1, (chunk_n1 - 1).clamp(min=0)), 0.0)
    # The sum of a chunk in float32 and that in float64 differ a little: go on with the share of the chunk.
    share_n1 = (target_n1 - start_n1) / (sums_nC.gather(1, chunk_n1) - start_n1)
    row_n = torch.arange(len(chunk_n1), device=weights_nV.device)
    within_nc = chunks_nCc[row_n, chunk_n1[:, 0]].double().cumsum(-1)
    inner_n1 = _below(share_n1 * within_nc[:, -1:], within_nc[:, -1:])
    return (chunk_n1 * _CHUNK + _first_above(within_nc, inner_n1))[:, 0]


def draw_from_top_k(
    weights_nV: Tensor, top_k_n: Tensor, greatest_k: int, top_p_n: Tensor, uniform_n: Tensor, spare: int = _SPARE
) -> Tensor:
    """The first top_k tokens of the order, and of these as few as reach the share top_p of their sum.

    Rows without top_k have one that is greater than the vocabulary.
    """
    vocab_size = weights_nV.shape[1]
    most = min(greatest_k + spare, vocab_size)
    values_nK, ids_nK = _first_in_order(weights_nV, most)
    sums_nK = values_nK.double().cumsum(-1)
    limit_n1 = top_k_n.clamp(max=vocab_size)[:, None]
    needed_n1 = _needed(top_p_n, sums_nK.gather(1, limit_n1 - 1))
    kept_n1 = ((sums_nK < needed_n1).sum(-1, keepdim=True) + 1).minimum(limit_n1)
    tokens_n = _draw_from_first(sums_nK, ids_nK, kept_n1, uniform_n)
    if most == vocab_size or not weights_nV.is_cpu:
        return tokens_n
    # Equal weights up to the end of the list: which of them are in it was not decided by the order.
    last_n = values_nK.gather(1, kept_n1 - 1)[:, 0]
    open_m = ((last_n == values_nK[:, -1]) & (last_n > 0)).nonzero()[:, 0]
    if len(open_m):
        tokens_n[open_m] = draw_from_top_k(
            weights_nV[open_m], top_k_n[open_m], greatest_k, top_p_n[open_m], uniform_n[open_m], most * _GROWTH
        )
    return tokens_n


def draw_from_top_p(weights_nV: Tensor, top_p_n: Tensor, uniform_n: Tensor) -> Tensor:
    """As few tokens of the order as reach the share top_p of all. On a CPU the first guess is that a few suffice."""
    vocab_size = weights_nV.shape[1]
    most = min(_NUCLEUS, vocab_size) if weights_nV.is_cpu else vocab_size
    values_nK, ids_nK = _first_in_order(weights_nV, most)
    sums_nK = values_nK.double().cumsum(-1)
    total_n1 = sums_nK[:, -1:] if most == vocab_size else _chunked(weights_nV).sum(-1).double().cumsum(-1)[:, -1:]
    kept_n1 = (sums_nK < _needed(top_p_n, total_n1)).sum(-1, keepdim=True) + 1
    tokens_n = _draw_from_first(sums_nK, ids_nK, kept_n1.clamp(max=most), uniform_n)
    if most < vocab_size:
        last_n = values_nK.gather(1, kept_n1.clamp(max=most) - 1)[:, 0]
        is_open_n = (kept_n1[:, 0] > most) | ((last_n == values_nK[:, -1]) & (last_n > 0))
        for n in is_open_n.nonzero()[:, 0].tolist():
            tokens_n[n] = _draw_from_large_nucleus(weights_nV[n].numpy(), float(top_p_n[n]), float(uniform_n[n]))
    return tokens_n


def _draw_from_large_nucleus(weights: npt.NDArray[np.float32], top_p: float, uniform: float) -> int:
    """Without sorting the vocabulary (12 ms for 150,000): the upper bits of a weight are its drawer, and only the
    drawer in which the nucleus ends and the one that the number falls into are looked at one by one."""
    if not np.isfinite(weights).all():
        return 0  # the row fails anyway
    # Positive floats have the order of their bits. Half of them: sign, exponent, 7 bits of mantissa.
    drawers = weights.view(np.int32) >> 16
    greatest = int(drawers.max())
    sums = np.bincount(drawers, weights=weights, minlength=greatest + 1)[::-1].cumsum()

    def drawer_from(rank: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        ids = np.flatnonzero(drawers == greatest - rank)
        ids = ids[np.argsort(-weights[ids], kind="stable")]
        return ids, (sums[rank - 1] if rank else 0.0) + weights[ids].cumsum(dtype=np.float64)

    needed = top_p * sums[-1]
    last_rank = min(int((sums < needed).sum()), greatest)
    ids, inner_sums = drawer_from(last_rank)
    last = min(int((inner_sums < needed).sum()), len(ids) - 1)
    target = min(uniform * inner_sums[last], np.nextafter(inner_sums[last], 0.0))
    rank = int((sums[:last_rank] <= target).sum())
    if rank < last_rank:
        ids, inner_sums = drawer_from(rank)
        last = len(ids) - 1
    return int(ids[min(int((inner_sums <= target).sum()), last)])


def _needed(top_p_n: Tensor, mass_n1: Tensor) -> Tensor:
    """The sum that must be reached; a share of 1 is never reached early."""
    return torch.where(top_p_n[:, None] < 1.0, top_p_n[:, None] * mass_n1, torch.inf)


def _first_in_order(weights_nV: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The first `most` weights and token ids, weights falling, ids rising among equals. On a CPU, which of those equal
    to the last are in it is left open: keys for all (`order.py`) would take twice as long."""
    if most == weights_nV.shape[1]:
        return torch.sort(weights_nV, dim=-1, descending=True, stable=True)
    if not weights_nV.is_cpu:
        # exact at once: asking whether a tie crosses the end would wait for the device
        ids_nK = ids_of(order_keys(weights_nV).topk(most, dim=-1).values, weights_nV.shape[1])
        return weights_nV.gather(1, ids_nK), ids_nK
    values_nK, ids_nK = weights_nV.topk(most, dim=-1)
    ids_nK, order_nK = ids_nK.sort(dim=-1)
    values_nK, order_nK = values_nK.gather(1, order_nK).sort(dim=-1, descending=True, stable=True)
    return values_nK, ids_nK.gather(1, order_nK)


def _draw_from_first(sums_nK: Tensor, ids_nK: Tensor, kept_n1: Tensor, uniform_n: Tensor) -> Tensor:
    total_n1 = sums_nK.gather(1, kept_n1 - 1)
    return ids_nK.gather(1, _first_above(sums_nK, _below(uniform_n[:, None] * total_n1, total_n1)))[:, 0]


def _first_above(sums_nK: Tensor, target_n1: Tensor) -> Tensor:
    """The first place whose running sum passes the target. The bound is for rows of NaN, whose token nobody uses."""
    return (sums_nK <= target_n1).sum(-1, keepdim=True).clamp(max=sums_nK.shape[1] - 1)


def _chunked(weights_nV: Tensor) -> Tensor:
    """[n, chunks, _CHUNK], padded with zeros. Each chunk is summed alone, so the sum does not depend on the batch."""
    missing = -weights_nV.shape[1] % _CHUNK
    return torch.nn.functional.pad(weights_nV, (0, missing)).unflatten(1, (-1, _CHUNK))


def _below(value: Tensor, bound: Tensor) -> Tensor:
    """At most the number just below the bound, so that a running sum always passes it."""
    return torch.minimum(value, torch.nextafter(bound, torch.zeros_like(bound)))
