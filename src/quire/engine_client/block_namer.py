"""The names of a prompt's blocks, made a piece at a time: a prompt of a million tokens would hold the event loop for a
tenth of a second, and all streams with it. Counts tokens, and knows no clock. Called by the link that needs the names.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.chain_hashes import ChainHasher, public_name
from quire.messages import EngineRequest

# About half a millisecond.
TOKENS_A_TURN = 8192


class BlockNamer:
    """One request at a time."""

    def __init__(self, block_size: int, key: bytes) -> None:
        self._hasher = ChainHasher(block_size, key)
        # of one turn of the loop
        self._most_blocks = max(1, TOKENS_A_TURN // block_size)
        self._num_left = self._most_blocks
        self._request: EngineRequest | None = None
        self._to_come: Iterator[bytes] = iter(())
        self._names: list[int] = []

    def begin_turn(self) -> None:
        self._num_left = self._most_blocks

    def names_of(self, request: EngineRequest) -> list[int] | None:
        """None: this turn has done its share. It goes on where it was when it is asked in the next one."""
        if request is not self._request:
            self._request = request
            self._to_come = self._hasher.names_of(request)
            self._names = []
        while self._num_left:
            name = next(self._to_come, None)
            if name is None:
                names = self._names
                self._request = None
                self._names = []
                return names
            self._names.append(public_name(name))
            self._num_left -= 1
        return None
