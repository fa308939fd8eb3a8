"""allowed_token_ids: nothing but these tokens may be chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.messages import AdmittedSequence, ForkedSequence, IntArray, int_array
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import RowStates, TokenPlaces


class AllowedTokenIds:
    """Keeps the logits of the allowed tokens and sets all others to -inf."""

    def __init__(self, table: RowTable) -> None:
        self._states: RowStates[IntArray] = RowStates(table.num_rows)

    def admit(self, sequence: AdmittedSequence) -> None:
        allowed = sequence.sampling.allowed_token_ids
        self._states.set(sequence.row, None if allowed is None else int_array(allowed))

    def fork(self, fork: ForkedSequence) -> None:
        self._states.set(fork.row, self._states.get(fork.parent_row))

    def release(self, row: int) -> None:
        self._states.set(row, None)

    def is_active(self, rows_N: IntArray) -> bool:
        return self._states.is_active(rows_N)

    def apply(self, logits_NV: Tensor, rows_N: IntArray) -> None:
        users = self._states.users(rows_N)
        positions = [position for position, _, _ in users]
        places = TokenPlaces(positions, [ids for _, _, ids in users], logits_NV)
        kept = places.read()
        index = torch.tensor(positions).to(logits_NV.device, non_blocking=True)
        logits_NV.index_fill_(0, index, -torch.inf)
        places.write(kept)
