"""Log-probabilities of the raw logits: the chosen token with its rank, and the k best.

Raw means before any processor and before temperature. Rank 1 is the most probable; equal ones rank by token id, the
lowest first, as everywhere (`order.py`): what a greedy row chose has rank 1 and stands first among the best.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import IntArray, TokenLogprobs
from quire.worker.sampler.choose import rows_in_slice
from quire.worker.sampler.order import ids_of, order_keys
from quire.worker.staging import Array, to_device


class LogprobReader:
    """Reads the chosen and the best ones out of rows of raw logits; `counts` says how many best a row wants."""

    def __init__(self, counts_n: IntArray, vocab_size: int) -> None:
        self._counts_n = np.minimum(counts_n, vocab_size)
        self._vocab_size = vocab_size

    def read(self, logits_nV: Tensor, tokens_n: Tensor) -> list[Tensor]:
        """What must come to the host: tokens, their log-probabilities and ranks, the best ones and theirs."""
        # in slices, because their order needs some 20 bytes a logit
        step = rows_in_slice(self._vocab_size, logits_nV.device)
        slices = [slice(start, start + step) for start in range(0, len(logits_nV), step)]
        parts = [self._read(logits_nV[rows], tokens_n[rows], int(self._counts_n[rows].max())) for rows in slices]
        most = max(ids_nK.shape[1] for _, _, ids_nK, _ in parts)
        return [
            tokens_n,
            *(torch.cat(tensors) for tensors in zip(*(part[:2] for part in parts), strict=True)),
            *(torch.cat([_widened(part[i], most) for part in parts]) for i in (2, 3)),
        ]

    def _read(self, logits_nV: Tensor, tokens_n: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Logits that differ by little may have the same log-probability, so the order is that of the logits.
        keys_nV = order_keys(logits_nV)
        ranks_n = (keys_nV > keys_nV.gather(1, tokens_n[:, None])).sum(-1) + 1
        ids_nK = ids_of(keys_nV.topk(count, dim=-1).values, self._vocab_size)
        del keys_nV
        logprobs_nV = logits_nV.log_softmax(-1)
        return logprobs_nV.gather(1, tokens_n[:, None])[:, 0], ranks_n, ids_nK, logprobs_nV.gather(1, ids_nK)

    def entries(self, arrays: Sequence[Array]) -> list[TokenLogprobs]:
        """One entry a row, out of what `read` gave, back on the host."""
        columns = (array.tolist() for array in arrays)
        return [
            TokenLogprobs(
                token_ids=[token, *ids[:count]], logprobs=[value, *values[:count]], ranks=[rank, *range(1, count + 1)]
            )
            for count, token, value, rank, ids, values in zip(self._counts_n.tolist(), *columns, strict=True)
        ]


class SampledLogprobs:
    """Those of sampled tokens. Built before processors change the logits in place, read when the tokens are known."""

    def __init__(self, logits_NV: Tensor, counts_N: IntArray) -> None:
        self._positions_n = np.flatnonzero(counts_N >= 0)
        self._is_asked = len(self._positions_n) > 0
        if self._is_asked:
            self._reader = LogprobReader(counts_N[self._positions_n], logits_NV.shape[1])
            (self._index_n,) = to_device([self._positions_n], logits_NV.device)
            self._logits_nV = logits_NV[self._index_n]

    def read(self, tokens_N: Tensor) -> list[Tensor]:
        return self._reader.read(self._logits_nV, tokens_N[self._index_n]) if self._is_asked else []

    def by_row(
        self, arrays: Sequence[Array], rows_N: IntArray, is_kept_N: npt.NDArray[np.bool_]
    ) -> dict[int, list[TokenLogprobs]]:
        """One entry for each token that is kept, in the order of the batch."""
        entries_by_row: dict[int, list[TokenLogprobs]] = {}
        if self._is_asked:
            columns = rows_N[self._positions_n].tolist(), is_kept_N[self._positions_n].tolist()
            for row, is_kept, entry in zip(*columns, self._reader.entries(arrays), strict=True):
                if is_kept:
                    entries_by_row.setdefault(row, []).append(entry)
        return entries_by_row


def _widened(tensor_nK: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor_nK, (0, width - tensor_nK.shape[1]))
