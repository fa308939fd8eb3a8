"""What a block holds, as bytes, and how these bytes stand in a store.

magic, version   8 bytes
checksum        16 bytes    keyed, over the name and what follows: a block under another's name is noticed, too
payload                     a block of each tensor of the cache, one behind the other
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import numpy as np
import numpy.typing as npt

Payload = npt.NDArray[np.uint8]

_MAGIC = b"QUIREKV1"
_CHECKSUM_BYTES = 16
_HEADER_BYTES = len(_MAGIC) + _CHECKSUM_BYTES


class Frames:
    """To bytes and back. With a secret nobody without it can make a block that is taken."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(digest_size=_CHECKSUM_BYTES, key=key)

    def wrap(self, name: bytes, payload: Payload) -> bytes:
        content = payload.data
        return b"".join((_MAGIC, self._checksum(name, content), content))

    def unwrap(self, name: bytes, frame: bytes) -> Payload | None:
        """None: these are not the bytes that were wrapped under this name."""
        view = memoryview(frame)
        if view[: len(_MAGIC)] != _MAGIC:
            return None
        content = view[_HEADER_BYTES:]
        if not hmac.compare_digest(view[len(_MAGIC) : _HEADER_BYTES], self._checksum(name, content)):
            return None
        return np.frombuffer(content, dtype=np.uint8)

    def _checksum(self, name: bytes, content: Any) -> bytes:
        hasher = self._keyed.copy()
        hasher.update(name)
        # as of whoever takes kibibytes at once, it lets other threads run meanwhile
        hasher.update(content)
        return hasher.digest()
