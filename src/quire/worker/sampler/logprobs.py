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
from quire.worker.sampler.choose import RowSettings, rows_in_slice
from quire.worker.staging import Array, to_device

# that a LogprobReader gives
_NUM_ARRAYS = 5


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


class NamedTokens:
    """Log-probabilities of tokens that requests name, whatever their rank: one entry for each pair of a row and a
    token."""

    def __init__(self, named: Sequence[IntArray | None], device: torch.device) -> None:
        """`named`: for each row that is read; None: it names none."""
        counts = [0 if tokens is None else len(tokens) for tokens in named]
        tokens = np.concatenate([one for one in named if one is not None])
        self._ends = np.cumsum(counts).tolist()
        self._token_ids = tokens.tolist()
        self._rows_m, self._tokens_m = to_device([np.repeat(np.arange(len(named)), counts), tokens], device)

    def read(self, logits_nV: Tensor, tokens_n: Tensor, logprobs_n: Tensor) -> Tensor:
        """By the chosen token of each row, whose log-probability is known."""
        totals_n = logits_nV.gather(1, tokens_n[:, None])[:, 0].float() - logprobs_n
        return logits_nV[self._rows_m, self._tokens_m].float() - totals_n[self._rows_m]

    def add_to(self, entries: list[TokenLogprobs], values_m: Array) -> None:
        """Behind the chosen tokens; rank 0 stands for none."""
        values = values_m.tolist()
        start = 0
        for entry, end in zip(entries, self._ends, strict=True):
            chosen = entry.token_ids[0]
            for token, value in zip(self._token_ids[start:end], values[start:end], strict=True):
                if token != chosen:
                    entry.token_ids.append(token)
                    entry.logprobs.append(value)
                    entry.ranks.append(0)
            start = end


class SampledLogprobs:
    """Those of the tokens of a batch in which some are asked for; `counts` is below 0 where none are. The raw logits
    are read when the tokens are known: what processors change must be a copy."""

    def __init__(
        self, counts_N: IntArray, vocab_size: int, device: torch.device, named: Sequence[IntArray | None] = ()
    ) -> None:
        """`named`: tokens of each row of the batch; empty: no row names any."""
        self._positions_n = np.flatnonzero(counts_N >= 0)
        self._reader = LogprobReader(counts_N[self._positions_n], vocab_size)
        (self._index_n,) = to_device([self._positions_n], device)
        self._named = NamedTokens([named[place] for place in self._positions_n.tolist()], device) if named else None

    @classmethod
    def of(cls, rows_N: IntArray, settings: RowSettings, vocab_size: int, device: torch.device) -> SampledLogprobs:
        named = [settings.named_tokens.get(row) for row in rows_N.tolist()] if settings.named_tokens else []
        has_named = any(tokens is not None for tokens in named)
        return cls(settings.num_logprobs[rows_N], vocab_size, device, named if has_named else ())

    def read(self, logits_NV: Tensor, tokens_N: Tensor) -> list[Tensor]:
        tokens_n = tokens_N[self._index_n]
        tensors = self._reader.read(logits_NV, tokens_n, self._index_n)
        if self._named is not None:
            tensors.append(self._named.read(logits_NV[self._index_n], tokens_n, tensors[1]))
        return tensors

    def by_row(
        self, arrays: Sequence[Array], rows_N: IntArray, is_kept_N: npt.NDArray[np.bool_]
    ) -> dict[int, list[TokenLogprobs]]:
        """One entry for each token that is kept, in the order of the batch."""
        entries_by_row: dict[int, list[TokenLogprobs]] = {}
        columns = rows_N[self._positions_n].tolist(), is_kept_N[self._positions_n].tolist()
        entries = self._reader.entries(arrays[:_NUM_ARRAYS])
        if self._named is not None:
            self._named.add_to(entries, arrays[_NUM_ARRAYS])
        for row, is_kept, entry in zip(*columns, entries, strict=True):
            if is_kept:
                entries_by_row.setdefault(row, []).append(entry)
        return entries_by_row


def _widened(tensor_nK: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor_nK, (0, width - tensor_nK.shape[1]))
