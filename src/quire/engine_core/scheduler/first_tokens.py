"""How much of the way to a first token was others' work (2.3.1: queue, prefill and interference).

Counted in tokens and without a clock: all that steps computed from the first step of a request to the one that brought
its first token, and how many of these were its own. What it computed twice because it gave way counts as others', too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from quire.engine_core.rows import Rows
from quire.messages import FirstToken, IntArray


@dataclass(slots=True)
class _Begin:
    """Of a sequence: where it stood, and the tokens of all steps before."""

    sequence_id: int
    num_computed: int
    num_decided: int


class FirstTokens:
    """Those that are waited for. A step without any of them costs one look at an array."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        # of all steps so far
        self.num_decided = 0
        self._is_awaited = np.zeros(rows.num_rows, dtype=np.bool_)
        self._begins: dict[int, _Begin] = {}

    def begin(self, row: int, sequence_id: int, num_computed: int) -> None:
        """It computes for the first time, in the step that is being decided."""
        self._begins[row] = _Begin(sequence_id, num_computed, self.num_decided)
        self._is_awaited[row] = True

    def decided(self, num_tokens: int) -> int:
        """A step has so many tokens. Those of all steps up to this one."""
        self.num_decided += num_tokens
        return self.num_decided

    def all_come(self) -> None:
        """A step has brought a token to everybody who waits for one, and nobody asks."""
        if self._begins:
            self._begins.clear()
            self._is_awaited[:] = False

    def come(self, rows: IntArray, num_decided: int) -> list[FirstToken]:
        """A step has brought a token to each of these rows. `num_decided`: as it was when that step was decided."""
        if not self._begins:
            return []
        awaited = rows[self._is_awaited[rows]]
        self._is_awaited[awaited] = False
        found = []
        for row, num_new in Counter(awaited.tolist()).items():
            begin = self._begins.pop(row)
            # else that one has ended before it had a token, and the row is somebody else's
            if self._rows.sequence_id[row] == begin.sequence_id:
                num_own = int(self._rows.num_known[row]) - num_new - begin.num_computed
                num_all = num_decided - begin.num_decided
                found.append(FirstToken(begin.sequence_id, max(0, num_all - num_own) / num_all))
        return found
