"""Vectors of prompts: of the rows that were asked for one, what their hidden states become.

Owns which rows pool, and the sums of those that take a mean. Same hooks as a logits processor. A row that pools samples
nothing: it is done when its last token is computed. Hidden states are taken as the model's last norm leaves them.

    last    the state of the last token: whatever came before may have come from a cache
    mean    the mean of all: summed chunk by chunk, each position once, also when it is computed again after a
            preemption. So nothing of such a prompt may come from a cache, which is the core's business.

Called by Sampler where `rows` has any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from quire.messages import AdmittedSequence, ForkedSequence
from quire.pooling_params import MEAN
from quire.worker.input_batch import InputBatch
from quire.worker.row_table import RowTable
from quire.worker.sampler.reading import Sampled
from quire.worker.staging import Array

# tokens
_SLICE = 512
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

    def __init__(self, table: RowTable) -> None:
        self._table = table
        # None: it wants its last token alone
        self.rows: dict[int, _Sum | None] = {}

    def admit(self, sequence: AdmittedSequence) -> None:
        self.rows.pop(sequence.row, None)
        if sequence.pooling:
            # one that had lost its row begins anew, and so does its sum
            self.rows[sequence.row] = _Sum() if sequence.pooling == MEAN else None

    def fork(self, fork: ForkedSequence) -> None:
        self.rows.pop(fork.row, None)

    def release(self, row: int) -> None:
        self.rows.pop(row, None)

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
                reading.add(row, hidden_TE[place + end - start - 1].float())
            return
        assert start <= done.num_tokens, "a mean lacks positions that were not computed here"
        if end > done.num_tokens:
            new_TE = hidden_TE[place + done.num_tokens - start : place + end - start]
            done = reading.sums[row] = _Sum(end, _sum_of(new_TE) + done.total_E)
        if is_done:
            assert isinstance(done.total_E, Tensor)
            reading.add(row, (done.total_E / done.num_tokens).float())


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
