"""Log-probabilities of the raw logits: the chosen token with its rank, and the k best.

Raw means before any processor and before temperature. Rank 1 is the most probable; equal ones rank by token id, the
lowest first, as everywhere: what a greedy row chose has rank 1 and stands first among the best.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import IntArray, TokenLogprobs
from quire.worker.kernels import token_logprobs
from quire.worker.sampler.choose import rows_in_slice
from quire.worker.staging import Array, to_device


class LogprobReader:
    """Reads the chosen and the best ones out of rows of raw logits; `counts` says how many best a row wants."""

    def __init__(self, counts_n: IntArray, vocab_size: int) -> None:
        self._counts_n = np.minimum(counts_n, vocab_size)
        self._vocab_size = vocab_size

    def read(self, logits_NV: Tensor, tokens_n: Tensor, rows_n: Tensor | None = None) -> list[Tensor]:
        """What must come to the host: tokens, their log-probabilities and ranks, the best ones and theirs. `rows_n`
        says which rows of the logits are meant, if not all."""
        # in slices, because the order needs some 20 bytes a logit where there is no kernel for it
        step = rows_in_slice(self._vocab_size, logits_NV.device)
        num_rows = len(tokens_n)
        if num_rows <= step:
            return [tokens_n, *token_logprobs(logits_NV, rows_n, tokens_n, int(self._counts_n.max()))]
        parts = []
        for part in (slice(start, start + step) for start in range(0, num_rows, step)):
            logits, rows = (logits_NV[part], None) if rows_n is None else (logits_NV, rows_n[part])
            parts.append(token_logprobs(logits, rows, tokens_n[part], int(self._counts_n[part].max())))
        most = max(ids_nK.shape[1] for _, _, ids_nK, _ in parts)
        return [
            tokens_n,
            *(torch.cat(tensors) for tensors in zip(*(part[:2] for part in parts), strict=True)),
            *(torch.cat([_widened(part[i], most) for part in parts]) for i in (2, 3)),
        ]

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
    """Those of the tokens of a batch in which some are asked for; `counts` is below 0 where none are. The raw logits
    are read when the tokens are known: what processors change must be a copy."""

    def __init__(self, counts_N: IntArray, vocab_size: int, device: torch.device) -> None:
        self._positions_n = np.flatnonzero(counts_N >= 0)
        self._reader = LogprobReader(counts_N[self._positions_n], vocab_size)
        (self._index_n,) = to_device([self._positions_n], device)

    def read(self, logits_NV: Tensor, tokens_N: Tensor) -> list[Tensor]:
        return self._reader.read(logits_NV, tokens_N[self._index_n], self._index_n)

    def by_row(
        self, arrays: Sequence[Array], rows_N: IntArray, is_kept_N: npt.NDArray[np.bool_]
    ) -> dict[int, list[TokenLogprobs]]:
        """One entry for each token that is kept, in the order of the batch."""
        entries_by_row: dict[int, list[TokenLogprobs]] = {}
        columns = rows_N[self._positions_n].tolist(), is_kept_N[self._positions_n].tolist()
        for row, is_kept, entry in zip(*columns, self._reader.entries(arrays), strict=True):
            if is_kept:
                entries_by_row.setdefault(row, []).append(entry)
        return entries_by_row


def _widened(tensor_nK: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor_nK, (0, width - tensor_nK.shape[1]))
