"""Recurrent states of the simulated worker: each block of one remembers its history, and how long that is.

A row that goes on must find the state of its own prefix, in all blocks and in their order, behind exactly as many
tokens as it has computed, or one more: then its first token is read, not absorbed again. What else it finds was copied
from the wrong place or too late, shared while it was written, or is the checkpoint of another prefix.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quire.messages import IntArray
from quire.testing.simulator.checking_cache import POISON
from quire.testing.simulator.checking_model import Hashes
from quire.testing.simulator.rows import SimulatedRows

_NOWHERE = -2


class SimulatedStates:
    """Blocks of the device and of swap space. Of a model without states there are no blocks, and nothing is checked."""

    def __init__(self, num_blocks: int, num_host_blocks: int, num_state_blocks: int) -> None:
        self.num_state_blocks = num_state_blocks
        self._hashes: Hashes = np.full(num_blocks, POISON)
        self._positions = np.full(num_blocks, _NOWHERE, dtype=np.int64)
        self._host_hashes: Hashes = np.full(num_host_blocks, POISON)
        self._host_positions = np.full(num_host_blocks, _NOWHERE, dtype=np.int64)
        # a block that lies at another place of the state than it was written at is wrong
        self._marks = np.arange(1, num_state_blocks + 1, dtype=np.uint64) << np.uint64(48)

    def move(self, swapped_out: IntArray, swapped_in: IntArray, copies: IntArray) -> None:
        """In the order of a step."""
        for device, host in ((self._hashes, self._host_hashes), (self._positions, self._host_positions)):
            host[swapped_out[1]] = device[swapped_out[0]]
            device[swapped_in[1]] = host[swapped_in[0]]
            device[copies[1]] = device[copies[0]]

    def poison(self, blocks: Iterable[int], host_blocks: Iterable[int]) -> None:
        self._hashes[list(blocks)] = POISON
        self._positions[list(blocks)] = _NOWHERE
        self._host_hashes[list(host_blocks)] = POISON
        self._host_positions[list(host_blocks)] = _NOWHERE

    def absorb(self, state: SimulatedRows, rows: IntArray, ends: IntArray, fails: npt.NDArray[np.bool_]) -> None:
        """Those that do not fail read their states and take in what is certain of [num_computed, ends)."""
        rows, ends = rows[~fails], ends[~fails]
        if not self.num_state_blocks or not len(rows):
            return
        starts = state.num_computed[rows]
        blocks = state.state_blocks[rows]
        assert blocks.min() >= 0, "a row computes without all blocks of its state"
        assert len(np.unique(blocks)) == blocks.size, "two rows write one state"
        found = np.where(starts == 0, 0, self._positions[blocks[:, 0]])
        for row, start, position in zip(rows.tolist(), starts.tolist(), found.tolist(), strict=True):
            is_right = position in {start, start + 1} if start else True
            assert is_right, f"row {row}: begins at {start}, but its state stands at {position}"
        is_read = starts > 0
        is_whole = (self._positions[blocks] == found[:, None]) & (
            self._hashes[blocks] == state.hashes[rows, found][:, None] ^ self._marks
        )
        is_wrong = is_read & ~is_whole.all(axis=1)
        assert not is_wrong.any(), f"rows {rows[is_wrong]}: the state of another prefix"
        certain = np.minimum(ends, state.num_total[rows] - state.num_drafts[rows])
        reached = np.maximum(found, certain)
        self._positions[blocks] = reached[:, None]
        self._hashes[blocks] = state.hashes[rows, reached][:, None] ^ self._marks
        state.num_absorbed[rows] = reached
