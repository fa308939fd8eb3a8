"""Vectors of prompts: of the rows that were asked for one, what their hidden states become.

Owns which rows pool, and the sums of those that take a mean. Same hooks as a logits processor. A row that pools samples
nothing: it is done when its last token is computed. Hidden states are taken as the model's last norm leaves them. What
is pooled may go through a head, of labels or of tokens: then its numbers are the vector.

    last    the state of the last token: whatever came before may have come from a cache
    cls     that of the first, of a model that computes a prompt in one step
    mean    the mean of all: summed chunk by chunk, each position once, also when it is computed again after a
            preemption. So nothing of such a prompt may come from a cache, which is the core's business.

Called by Sampler where `rows` has any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.messages import AdmittedSequence, ForkedSequence, int_array
from quire.pooling_params import CLS, MEAN
from quire.worker.input_batch import InputBatch
from quire.worker.row_table import RowTable
from quire.worker.sampler.reading import Sampled
from quire.worker.staging import Array, to_device

# tokens
_SLICE = 512
Head: TypeAlias = Callable[[Tensor], Tensor]
NOT_FINITE = "the model's hidden states are not finite (NaN or infinity), so there is no vector."


@dataclass(frozen=True)
class _Sum:
    """Of the first so many positions. In float64: a prompt in chunks is to give what the whole one gives."""

    num_tokens: int = 0
    total_E: Tensor | float = 0.0


class Pooling:
    """Looks at the hidden states of a step."""

    parameter_of = attrgetter("pooling")
    none = ""

    def __init__(self, table: RowTable, compute_logits: Head, classify: Head | None = None) -> None:
        self._table = table
        self._compute_logits = compute_logits
        self._classify = classify
        # None: it wants one token alone
        self.rows: dict[int, _Sum | None] = {}
        # rows whose one token is the first
        self._of_first: set[int] = set()
        # what the pooled state of a row goes through, where it is not the vector itself
        self._heads: dict[int, Head] = {}

    def admit(self, sequence: AdmittedSequence) -> None:
        self.release(sequence.row)
        if sequence.pooling:
            # one that had lost its row begins anew, and so does its sum
            self.rows[sequence.row] = _Sum() if sequence.pooling == MEAN else None
        if sequence.pooling == CLS:
            self._of_first.add(sequence.row)
        if sequence.label_token_ids:
            self._heads[sequence.row] = _OfTokens(self._compute_logits, sequence.label_token_ids)
        elif sequence.is_classified:
            if self._classify is None:
                raise ModelError("is_classified: this model has no head of labels.")
            self._heads[sequence.row] = self._classify

    def fork(self, fork: ForkedSequence) -> None:
        self.release(fork.row)

    def release(self, row: int) -> None:
        self.rows.pop(row, None)
        self._of_first.discard(row)
        self._heads.pop(row, None)

    def start(self, hidden_TE: Tensor, batch: InputBatch) -> PoolingReading:
        """What this step brings; its tensors go to the host together with the sampled tokens."""
        reading = PoolingReading(self.rows)
        for s in np.flatnonzero(np.isin(batch.rows_S, list(self.rows))).tolist():
            self._add_row(reading, s, hidden_TE, batch)
        return reading

    def _add_row(self, reading: PoolingReading, s: int, hidden_TE: Tensor, batch: InputBatch) -> None:
        row = int(batch.rows_S[s])
        start = int(batch.num_computed_S[s])
        end = start + int(batch.num_tokens_S[s])
        place = int(batch.query_starts_S1[s])
        is_done = bool(self._table.is_final[row]) and end >= int(self._table.num_total[row])
        done = self.rows[row]
        if done is None:
            if is_done:
                taken = place if row in self._of_first else place + end - start - 1
                self._add(reading, row, hidden_TE[taken], hidden_TE.dtype)
            return
        assert start <= done.num_tokens, "a mean lacks positions that were not computed here"
        if end > done.num_tokens:
            new_TE = hidden_TE[place + done.num_tokens - start : place + end - start]
            done = reading.sums[row] = _Sum(end, _sum_of(new_TE) + done.total_E)
        if is_done:
            assert isinstance(done.total_E, Tensor)
            self._add(reading, row, (done.total_E / done.num_tokens).float(), hidden_TE.dtype)

    def _add(self, reading: PoolingReading, row: int, pooled_E: Tensor, dtype: torch.dtype) -> None:
        """Each row alone: its bits do not depend on the others."""
        head = self._heads.get(row)
        reading.add(row, pooled_E.float() if head is None else head(pooled_E.to(dtype)[None])[0].float())


@dataclass(frozen=True)
class _OfTokens:
    """Of all logits those of some tokens."""

    compute_logits: Head
    token_ids: list[int]

    def __call__(self, hidden_NE: Tensor) -> Tensor:
        logits_NV = self.compute_logits(hidden_NE)
        [index] = to_device([int_array(self.token_ids)], logits_NV.device)
        return logits_NV.index_select(1, index)


def _sum_of(states_TE: Tensor) -> Tensor:
    """In slices: a large step as float64 would take memory that nobody has measured."""
    total_E, *others = (part_TE.sum(dim=0, dtype=torch.float64) for part_TE in states_TE.split(_SLICE))
    for part_E in others:
        total_E = total_E + part_E
    return total_E


class PoolingReading:
    """Vectors of one step on their way to the host."""

    def __init__(self, rows: dict[int, _Sum | None]) -> None:
        self._rows = rows
        # they count once they are settled
        self.sums: dict[int, _Sum] = {}
        self.done: list[int] = []
        self.tensors: list[Tensor] = []

    def add(self, row: int, vector_E: Tensor) -> None:
        self.done.append(row)
        self.tensors.append(vector_E)

    def settle(self, arrays: Sequence[Array], sampled: Sampled) -> None:
        """float32 vectors as bytes."""
        self._rows.update(self.sums)
        for row, vector_E in zip(self.done, arrays, strict=True):
            if np.isfinite(vector_E).all():
                sampled.output.vectors[row] = vector_E.tobytes()
            else:
                sampled.fail(row, NOT_FINITE, is_not_finite=True)
