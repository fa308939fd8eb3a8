"""With what the name of a block begins: who can read it."""

from __future__ import annotations

import hashlib

from quire.config import shared_key
from quire.kv_connectors.connector import CacheLayout

NAMESPACE_BYTES = 16
# Raised where a block of the same layout means something else: how a model's keys are turned, how values are scaled, in
# which order a block's bytes stand, how its name is made. Stores outlive the Quire that wrote them.
FORMAT = 1


def namespace_of(layout: CacheLayout) -> bytes:
    """Of all engines that can read each other's blocks."""
    hasher = hashlib.blake2b(digest_size=NAMESPACE_BYTES, key=shared_key("namespace"))
    hasher.update(f"format {FORMAT} {layout!r}".encode())
    return hasher.digest()
