"""What a logits processor is: an object with five hooks, and the store that most of them keep their rows in.

A processor changes the logits of the rows that use it, in place, and touches no other row. One that no row of the step
uses costs one look at an empty dictionary. The order of processors is the order of the tuple in `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import AdmittedSequence, ForkedSequence, IntArray

State = TypeVar("State")


class RowFollower(Protocol):
    """Whatever keeps something for each row: three hooks over a row's life."""

    def admit(self, sequence: AdmittedSequence) -> None:
        """A sequence takes a row; whatever the row held before is gone."""
        ...

    def fork(self, fork: ForkedSequence) -> None:
        """A child takes a row, with the tokens [0, num_total_tokens) and the parameters of its parent."""
        ...

    def release(self, row: int) -> None:
        """The row is free."""
        ...


class LogitsProcessor(RowFollower, Protocol):
    """Two more hooks over a step. Rows of a step are distinct."""

    def is_active(self, rows_N: IntArray) -> bool:
        """Whether any of these rows uses it in this step."""
        ...

    def apply(self, logits_NV: Tensor, rows_N: IntArray) -> None:
        """Change float32 logits in place; logits[i] are those of the token that rows[i] samples next."""
        ...


class RowStates(Generic[State]):
    """States of the few rows that use a processor."""

    def __init__(self, num_rows: int) -> None:
        self._states: dict[int, State] = {}
        self._has_state = np.zeros(num_rows, dtype=np.bool_)

    def set(self, row: int, state: State | None) -> None:
        self._has_state[row] = state is not None
        if state is None:
            self._states.pop(row, None)
        else:
            self._states[row] = state

    def get(self, row: int) -> State | None:
        return self._states.get(row)

    def is_active(self, rows_N: IntArray) -> bool:
        return bool(self._states) and bool(self._has_state[rows_N].any())

    def users(self, rows_N: IntArray) -> list[tuple[int, int, State]]:
        """(position in the batch, row, state) of each row that has one."""
        positions = np.flatnonzero(self._has_state[rows_N]).tolist()
        return [(position, row, self._states[row]) for position in positions for row in (int(rows_N[position]),)]


class TokenPlaces:
    """Places (position, token id) in a matrix of logits, as one index into its flat view.

    Ids beyond the vocabulary are left out: such a token can neither be chosen nor be excluded.
    """

    def __init__(self, positions: Sequence[int], ids: Sequence[IntArray], logits_NV: Tensor) -> None:
        vocab_size = logits_NV.shape[1]
        self._lengths = [len(row_ids) for row_ids in ids]
        flat_ids = np.concatenate(ids)
        places = np.repeat(np.array(positions, dtype=np.int64) * vocab_size, self._lengths) + flat_ids
        self._is_kept = flat_ids < vocab_size
        self._logits = logits_NV.view(-1)
        self._index = torch.from_numpy(places[self._is_kept]).to(logits_NV.device, non_blocking=True)

    def read(self) -> Tensor:
        return self._logits[self._index]

    def write(self, values: Tensor | float) -> None:
        if isinstance(values, float):
            self._logits.index_fill_(0, self._index, values)
        else:
            self._logits[self._index] = values

    def each(self, values: Sequence[npt.NDArray[np.float32]]) -> Tensor:
        """One value for each place, given as one array for each position."""
        return self._to_device(np.concatenate(values))

    def repeated(self, values: Sequence[float]) -> Tensor:
        """One value for each place, given as one number for each position."""
        return self._to_device(np.repeat(np.array(values, dtype=np.float32), self._lengths))

    def _to_device(self, values: npt.NDArray[np.float32]) -> Tensor:
        kept = values[self._is_kept].astype(np.float32, copy=False)
        return torch.from_numpy(kept).to(self._logits.device, non_blocking=True)
