"""Steps of the simulated worker in which rows get several tokens, as those of a CPU's worker do.

A worker goes on for as long as a clock lets it, so any number of tokens is right that ends where a row's blocks end.
Here the step decides it, and nothing else. Rows go on behind their stop tokens and lengths too, which workers do not:
what the core takes of it is what is right.
"""

from __future__ import annotations

import zlib

from quire.messages import IntArray
from quire.testing.simulator.rows import SimulatedRows

_MOST_TOKENS = 9


class SimulatedBursts:
    """`share` of the steps in which rows may get several tokens bring some."""

    def __init__(self, rows: SimulatedRows, block_size: int) -> None:
        self._rows = rows
        self._block_size = block_size
        self.share = 0.0
        self.num_steps = 0

    def num_more(self, step: int) -> int:
        """Tokens behind the first, at most."""
        number = zlib.crc32(f"burst {step}".encode())
        return 1 + number % _MOST_TOKENS if number / 2**32 < self.share else 0

    def may_go_on(self, rows: IntArray) -> bool:
        """Whether each has a place for another token in the block of the last one, and one is left then: the step that
        is decided meanwhile counts on it."""
        places = self._rows.num_computed[rows] % self._block_size
        return bool(((places > 0) & (places < self._block_size - 1)).all())
