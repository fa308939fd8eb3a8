"""What the core lets a row choose while it runs: tokens that are excluded, or the only ones that are not.

Unlike what a request asks for, it changes between two steps (SchedulerOutput.masked).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.messages import NO_INTS, AdmittedSequence, IntArray, TokenMask, int_array
from quire.worker.sampler.processors.processor import ByRow, TokenPlaces, User


class Excluded:
    """The tokens that a mask leaves out; worked out once, however often it is applied."""

    def __init__(self, mask: TokenMask) -> None:
        self._mask = mask
        self._token_ids: IntArray | None = None

    def token_ids(self, vocab_size: int) -> IntArray:
        if self._token_ids is None:
            allowed = self._mask.allowed
            others = NO_INTS if allowed is None else np.setdiff1d(np.arange(vocab_size), int_array(allowed))
            self._token_ids = np.union1d(others, int_array(self._mask.banned)).astype(np.int64)
        return self._token_ids


class TokenMasks(ByRow[Excluded]):
    """By row."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(MaskRule(), num_rows, "mask")

    def replace(self, row: int, mask: TokenMask | None) -> None:
        self._set(row, None if mask is None else Excluded(mask))


class MaskRule:
    """Sets the logits of what is excluded to -inf."""

    def state_of(self, sequence: AdmittedSequence) -> Excluded | None:
        return None if sequence.mask is None else Excluded(sequence.mask)

    def state_of_child(self, parent: Excluded) -> Excluded:
        return parent

    def apply(self, logits_NV: Tensor, users: list[User[Excluded]]) -> None:
        ids = [user.state.token_ids(logits_NV.shape[1]) for user in users]
        TokenPlaces([user.position for user in users], ids, logits_NV).write(-np.inf)
