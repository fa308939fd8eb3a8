"""What a logits processor is: an object with six hooks; and `ByRow`, which has five of them for most processors.

A processor changes the logits of the rows that use it, in place, and touches no other row. One that no row of the step
uses costs one look at an empty dictionary. The order of processors is the order of the tuple in `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.messages import AdmittedSequence, ForkedSequence, IntArray
from quire.worker.staging import Array, to_device

State = TypeVar("State")


class User(NamedTuple, Generic[State]):
    """A row that uses a processor, its position in the batch, and how many of its tokens precede the one that is chosen
    there."""

    position: int
    row: int
    length: int
    state: State


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


class RowFeature(RowFollower, Protocol):
    """What only some rows ask for. A row that does not is not admitted, and where no row does nobody asks it."""

    # what a sequence says about it, and what it says if it asks for nothing
    parameter_of: attrgetter[Any]
    none: Any

    @property
    def rows(self) -> Collection[int]:
        """Those that ask for it."""
        ...


class LogitsProcessor(RowFeature, Protocol):
    """Three more hooks over a step. A row with drafts occurs several times in it, side by side, with rising lengths."""

    # whether it also changes log-probabilities among which the core chooses
    holds_for_beams: bool

    def is_active(self, rows_N: IntArray) -> bool:
        """Whether any of these rows uses it. Asked when rows have come or gone, not in every step, and while there are
        `rows` at all."""
        ...

    def is_used_by(self, rows_N: IntArray) -> npt.NDArray[np.bool_]:
        """Which of these rows use it. Asked after `is_active`."""
        ...

    def apply(self, logits_NV: Tensor, rows_N: IntArray, lengths_N: IntArray) -> None:
        """Change float32 logits in place; logits[i] are those of the token after the first lengths[i] of rows[i].
        Drafts may be among these, so nothing may be kept of them. Rows that do not use it may be there, too."""
        ...


class Rule(Protocol[State]):
    """What differs between processors that keep a state for the few rows that use them; `ByRow` makes a processor of
    one. `State | None`: None means that the row does not use it."""

    def state_of(self, sequence: AdmittedSequence) -> State | None: ...

    def state_of_child(self, parent: State) -> State: ...

    def apply(self, logits_NV: Tensor, users: list[User[State]]) -> None:
        """Change the logits of the users, of which there is at least one."""
        ...


class ByRow(Generic[State]):
    """A logits processor that follows a rule, and the states of the rows that use it."""

    def __init__(
        self, rule: Rule[State], num_rows: int, parameter: str, none: Any = None, *, holds_for_beams: bool = False
    ) -> None:
        """`parameter`: of the sequence, what the rule is about; where it is `none`, the rule need not look."""
        self._rule = rule
        self.holds_for_beams = holds_for_beams
        self.parameter_of = attrgetter(parameter)
        self.none = none
        # states by row
        self.rows: dict[int, State] = {}
        self._has_state = np.zeros(num_rows, dtype=np.bool_)

    def admit(self, sequence: AdmittedSequence) -> None:
        self._set(sequence.row, self._rule.state_of(sequence))

    def fork(self, fork: ForkedSequence) -> None:
        parent = self.rows.get(fork.parent_row)
        self._set(fork.row, None if parent is None else self._rule.state_of_child(parent))

    def release(self, row: int) -> None:
        self._set(row, None)

    def is_active(self, rows_N: IntArray) -> bool:
        return bool(self._has_state[rows_N].any())

    def is_used_by(self, rows_N: IntArray) -> npt.NDArray[np.bool_]:
        return self._has_state[rows_N]

    def apply(self, logits_NV: Tensor, rows_N: IntArray, lengths_N: IntArray) -> None:
        positions_n = np.flatnonzero(self._has_state[rows_N])
        columns = positions_n.tolist(), rows_N[positions_n].tolist(), lengths_N[positions_n].tolist()
        users = [User(position, row, length, self.rows[row]) for position, row, length in zip(*columns, strict=True)]
        self._rule.apply(logits_NV, users)

    def _set(self, row: int, state: State | None) -> None:
        self._has_state[row] = state is not None
        if state is None:
            self.rows.pop(row, None)
        else:
            self.rows[row] = state


class TokenPlaces:
    """Places (position, token id) in a matrix of logits, as one index into its flat view.

    Ids that are not in the vocabulary are left out: such a token can neither be chosen nor be excluded. On a CPU
    everything is numpy's, whose indexing costs a quarter of torch's for a few places.
    """

    def __init__(self, positions: Sequence[int], ids: Sequence[IntArray], logits_NV: Tensor) -> None:
        vocab_size = logits_NV.shape[1]
        flat_ids = np.concatenate(ids)
        places = np.repeat(np.array(positions, dtype=np.int64) * vocab_size, [len(row_ids) for row_ids in ids])
        # -1 would be a logit of the row before
        self._is_kept = (flat_ids >= 0) & (flat_ids < vocab_size)
        self._device = logits_NV.device
        self._logits: Any = logits_NV.view(-1).numpy() if logits_NV.is_cpu else logits_NV.view(-1)
        self._index = self._moved((places + flat_ids)[self._is_kept])

    def read(self) -> Any:
        return self._logits[self._index]

    def write(self, values: Any) -> None:
        if isinstance(values, float) and isinstance(self._logits, Tensor):
            self._logits.index_fill_(0, self._index, values)
        else:
            self._logits[self._index] = values

    def each(self, values: Sequence[npt.NDArray[np.float32]]) -> Any:
        """One value for each place, given as one array for each position."""
        return self._moved(np.concatenate(values)[self._is_kept])

    def _moved(self, values: Array) -> Any:
        return values if self._device.type == "cpu" else to_device([values], self._device)[0]
