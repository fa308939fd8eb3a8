"""Penalties on what was said already: repetition, frequency and presence, in this order, in one pass.

What they mean is written in `kernels/reference/penalise.py`. A row's tokens are read from the row table, drafts
included, and counted anew in every step: for what a step costs, that is little, and nothing need follow a row's life.
"""

from __future__ import annotations

from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import AdmittedSequence, ForkedSequence, IntArray
from quire.worker.kernels import penalise
from quire.worker.row_table import RowTable


class Penalties:
    """The three numbers of every row; a logits processor with all hooks."""

    parameter_of = attrgetter("sampling.repetition_penalty", "sampling.frequency_penalty", "sampling.presence_penalty")
    none = (1.0, 0.0, 0.0)
    holds_for_beams = True

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self.rows: set[int] = set()
        self._strengths = np.full((table.num_rows, 3), self.none, dtype=np.float32)
        self._is_used = np.zeros(table.num_rows, dtype=np.bool_)

    def admit(self, sequence: AdmittedSequence) -> None:
        strengths = self.parameter_of(sequence)
        self._strengths[sequence.row] = strengths
        self._use(sequence.row, is_used=strengths != self.none)

    def fork(self, fork: ForkedSequence) -> None:
        self._strengths[fork.row] = self._strengths[fork.parent_row]
        self._use(fork.row, is_used=fork.parent_row in self.rows)

    def release(self, row: int) -> None:
        # whoever has the row next may stand in a batch beside one that is penalised, and need not be admitted here
        self._strengths[row] = self.none
        self._use(row, is_used=False)

    def _use(self, row: int, *, is_used: bool) -> None:
        self._is_used[row] = is_used
        (self.rows.add if is_used else self.rows.discard)(row)

    def is_active(self, rows_N: IntArray) -> bool:
        return bool(self._is_used[rows_N].any())

    def is_used_by(self, rows_N: IntArray) -> npt.NDArray[np.bool_]:
        return self._is_used[rows_N]

    def apply(self, logits_NV: Tensor, rows_N: IntArray, lengths_N: IntArray) -> None:
        table = self._table
        repetition_N, frequency_N, presence_N = (
            torch.from_numpy(column) for column in self._strengths[rows_N].T.copy()
        )
        penalise(
            logits_NV,
            torch.from_numpy(table.token_ids),
            rows_n=torch.from_numpy(rows_N),
            num_prompt_n=torch.from_numpy(table.num_prompt[rows_N]),
            lengths_n=torch.from_numpy(lengths_N),
            repetition_n=repetition_N,
            frequency_n=frequency_N,
            presence_n=presence_N,
        )
