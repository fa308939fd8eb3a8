"""Log-probabilities of the raw logits: the chosen token with its rank, and the k best.

Raw means before any processor and before temperature. Rank 1 is the most probable; equal tokens share a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quire.messages import IntArray, TokenLogprobs
from quire.worker.staging import Array, to_device


class LogprobReader:
    """Reads the chosen and the best ones out of rows of log-probabilities; `counts` says how many best a row wants.

    Rows of equal count are read together: which of several equal tokens is among the best must not depend on what
    else is in the batch.
    """

    def __init__(self, counts_n: IntArray, vocab_size: int) -> None:
        counts_n = np.minimum(counts_n, vocab_size)
        self._members = [(int(count), np.flatnonzero(counts_n == count)) for count in np.unique(counts_n) if count > 0]

    def read(self, logprobs_nV: Tensor, tokens_n: Tensor) -> list[Tensor]:
        """What must come to the host."""
        chosen_n1 = logprobs_nV.gather(1, tokens_n[:, None])
        tensors = [tokens_n, chosen_n1[:, 0], (logprobs_nV > chosen_n1).sum(-1) + 1]
        for count, members in self._members:
            rows = logprobs_nV
            if len(members) < len(logprobs_nV):
                rows = logprobs_nV[to_device([members], logprobs_nV.device)[0]]
            values_mk, ids_mk = rows.topk(count, dim=-1)
            tensors += [ids_mk, values_mk]
        return tensors

    def entries(self, arrays: Sequence[Array]) -> list[TokenLogprobs]:
        """One entry a row, out of what `read` gave, back on the host."""
        tokens, chosen, ranks, *best = (array.tolist() for array in arrays)
        entries = [
            TokenLogprobs(token_ids=[token], logprobs=[value], ranks=[rank])
            for token, value, rank in zip(tokens, chosen, ranks, strict=True)
        ]
        for (count, members), ids, values in zip(self._members, best[0::2], best[1::2], strict=True):
            for place, row_ids, row_values in zip(members.tolist(), ids, values, strict=True):
                entries[place].token_ids += row_ids
                entries[place].logprobs += row_values
                entries[place].ranks += range(1, count + 1)
        return entries


class SampledLogprobs:
    """Those of sampled tokens. Built before processors change the logits in place, read when the tokens are known."""

    def __init__(self, logits_NV: Tensor, counts_N: IntArray) -> None:
        self._positions_n = np.flatnonzero(counts_N >= 0)
        self._is_asked = len(self._positions_n) > 0
        if self._is_asked:
            self._reader = LogprobReader(counts_N[self._positions_n], logits_NV.shape[1])
            (self._index_n,) = to_device([self._positions_n], logits_NV.device)
            self._logprobs_nV = logits_NV[self._index_n].log_softmax(-1)

    def read(self, tokens_N: Tensor) -> list[Tensor]:
        return self._reader.read(self._logprobs_nV, tokens_N[self._index_n]) if self._is_asked else []

    def by_row(self, arrays: Sequence[Array], rows_N: IntArray) -> dict[int, list[TokenLogprobs]]:
        if not self._is_asked:
            return {}
        rows = rows_N[self._positions_n].tolist()
        return {row: [entry] for row, entry in zip(rows, self._reader.entries(arrays), strict=True)}
