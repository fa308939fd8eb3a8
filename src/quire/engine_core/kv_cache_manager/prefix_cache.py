"""Names of block contents: a chain hash over (parent, tokens, whatever else changes the content).

The digest is keyed per engine, so that nobody outside can make two prompts collide (SHA-2 class, 128 bits).
"""

from __future__ import annotations

import hashlib
import os

from quire.engine_core.request import Sequence

_DIGEST_SIZE = 16


class PrefixHasher:
    """Computes and remembers the chain hashes of a sequence's full blocks."""

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        self.block_size = block_size
        # The key comes from the system, not from the engine's seed: it must not be guessed, and it changes no output.
        self._key = os.urandom(32) if key is None else key

    def hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Hashes of the first num_blocks full blocks; earlier results are kept on the sequence."""
        known = sequence.block_hashes
        if len(known) < num_blocks:
            parent = known[-1] if known else self._digest(sequence.request.content_key)
            tokens = sequence.token_ids(0, num_blocks * self.block_size)
            for index in range(len(known), num_blocks):
                content = tokens[index * self.block_size : (index + 1) * self.block_size].tobytes()
                parent = self._digest(parent + content)
                known.append(parent)
        return known[:num_blocks]

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=_DIGEST_SIZE, key=self._key).digest()
