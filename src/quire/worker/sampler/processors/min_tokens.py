"""min_tokens: no end token and no stop token before so many tokens of output."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.messages import AdmittedSequence, ForkedSequence, IntArray, int_array
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import RowStates, TokenPlaces


class MinTokens:
    """Excludes the stop tokens of a row as long as its output is short. `ignore_eos` leaves the end tokens alone."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._min_tokens = np.zeros(table.num_rows, dtype=np.int64)
        self._states: RowStates[IntArray] = RowStates(table.num_rows)

    def admit(self, sequence: AdmittedSequence) -> None:
        sampling = sequence.sampling
        ids = sampling.stop_token_ids + ([] if sampling.ignore_eos else sequence.eos_token_ids)
        self._min_tokens[sequence.row] = sampling.min_tokens
        self._states.set(sequence.row, int_array(ids) if sampling.min_tokens and ids else None)

    def fork(self, fork: ForkedSequence) -> None:
        self._min_tokens[fork.row] = self._min_tokens[fork.parent_row]
        self._states.set(fork.row, self._states.get(fork.parent_row))

    def release(self, row: int) -> None:
        self._states.set(row, None)

    def is_active(self, rows_N: IntArray) -> bool:
        return self._states.is_active(rows_N) and bool(self._is_short(rows_N).any())

    def apply(self, logits_NV: Tensor, rows_N: IntArray) -> None:
        is_short = self._is_short(rows_N)
        users = [user for user in self._states.users(rows_N) if is_short[user[0]]]
        if users:
            TokenPlaces([user[0] for user in users], [ids for _, _, ids in users], logits_NV).write(-torch.inf)

    def _is_short(self, rows_N: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return (self._table.num_total[rows_N] - self._table.num_prompt[rows_N]) < self._min_tokens[rows_N]
