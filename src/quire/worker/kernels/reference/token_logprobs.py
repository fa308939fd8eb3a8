"""Log-probabilities of the tokens of rows, and of the best tokens."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels.reference.order import ids_of, order_keys


def token_logprobs(
    logits_NV: Tensor, rows_n: Tensor | None, tokens_n: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probability, rank) of the tokens, then (ids, log-probabilities) of the `most` best ones.

    Logits that differ by little may have the same log-probability, so the order is that of the logits. Rows that are
    not finite get something.
    """
    logits_nV = (logits_NV if rows_n is None else logits_NV[rows_n]).float()
    keys_nV = order_keys(logits_nV)
    ranks_n = (keys_nV > keys_nV.gather(1, tokens_n[:, None])).sum(-1) + 1
    ids_nK = ids_of(keys_nV.topk(most, dim=-1).values, logits_nV.shape[1])
    del keys_nV
    logprobs_nV = logits_nV.log_softmax(-1)
    return logprobs_nV.gather(1, tokens_n[:, None])[:, 0], ranks_n, ids_nK, logprobs_nV.gather(1, ids_nK)
