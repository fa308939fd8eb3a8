"""logit_bias: a number added to the logits of chosen tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.messages import AdmittedSequence, ForkedSequence, IntArray, int_array
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import RowStates, TokenPlaces


class LogitBias:
    """Token ids and what to add to them."""

    def __init__(self, table: RowTable) -> None:
        self._states: RowStates[tuple[IntArray, npt.NDArray[np.float32]]] = RowStates(table.num_rows)

    def admit(self, sequence: AdmittedSequence) -> None:
        bias = sequence.sampling.logit_bias
        state = (int_array(list(bias)), np.array(list(bias.values()), dtype=np.float32)) if bias else None
        self._states.set(sequence.row, state)

    def fork(self, fork: ForkedSequence) -> None:
        self._states.set(fork.row, self._states.get(fork.parent_row))

    def release(self, row: int) -> None:
        self._states.set(row, None)

    def is_active(self, rows_N: IntArray) -> bool:
        return self._states.is_active(rows_N)

    def apply(self, logits_NV: Tensor, rows_N: IntArray) -> None:
        users = self._states.users(rows_N)
        places = TokenPlaces([user[0] for user in users], [ids for _, _, (ids, _) in users], logits_NV)
        places.write(places.read() + places.each([values for _, _, (_, values) in users]))
