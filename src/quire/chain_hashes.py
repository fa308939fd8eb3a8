"""The names of a prompt's blocks: chain hashes over (parent, tokens, whatever else changes the content).

Keyed, so that nobody outside can make two prompts collide (128 bits). The engine core names its blocks so; a router
that has the same key says of a prompt which names its blocks will have, and so who holds them (routing/).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.messages import EngineRequest, Media

_DIGEST_SIZE = 16


class ChainHasher:
    """Hashes of full blocks. Knows no sequence and keeps nothing."""

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        self.block_size = block_size
        # The key comes from the system, not from the engine's seed: it must not be guessed, and it changes no output.
        key = os.urandom(32) if key is None else key
        # what the weights have become since the engine was started; empty: they are those of the checkpoint
        self.weights_version = b""
        self._keyed = hashlib.blake2b(digest_size=_DIGEST_SIZE, key=key)

    def own(self, parent: bytes, scope: bytes) -> bytes:
        """What a tenant's own part is chained to, behind `parent`."""
        return self.digest(parent + scope)

    def root(self, content_key: bytes) -> bytes:
        """What the first block's hash is chained to."""
        return self.digest(self.weights_version + content_key)

    def chain(
        self, parent: bytes, tokens: Iterable[int] | np.ndarray, contents: Iterable[bytes] | None = None
    ) -> list[bytes]:
        """Hashes of the full blocks of these tokens, which follow `parent`; `contents`: what else each block holds."""
        content = np.asarray(tokens, dtype=np.int32).tobytes()
        size = self.block_size * 4
        hashes = []
        others = itertools.repeat(b"") if contents is None else iter(contents)
        for start, other in zip(range(0, len(content) - size + 1, size), others, strict=False):
            parent = self.digest(parent + content[start : start + size] + other)
            hashes.append(parent)
        return hashes

    def digest(self, content: bytes) -> bytes:
        hasher = self._keyed.copy()  # the key is absorbed once
        hasher.update(content)
        return hasher.digest()

    def of_images(self, media: Sequence[Media], index: int) -> bytes:
        """What the images say whose placeholders a block touches: which one, and where it begins. Of fixed length for
        each, behind tokens of fixed length, so no two contents run into each other."""
        if not media:
            return b""
        first, end = index * self.block_size, (index + 1) * self.block_size
        touched = [image for image in media if image.start < end and image.end > first]
        return b"".join(struct.pack("<q", image.start - first) + _name_of(image) for image in touched)

    def names_of(self, request: EngineRequest) -> Iterator[bytes]:
        """Of a prompt's full blocks, one after the other, as the core will name them if none of them belongs to a
        pinned prefix that several tenants share. No part of it is work for the whole prompt."""
        name = self.root(user_key(request))
        if request.tenant is not None and request.tenant.cache_scope:
            name = self.own(name, request.tenant.cache_scope.encode())
        tokens = request.prompt_token_ids
        size = self.block_size
        as_bytes = struct.Struct(f"={size}i").pack
        for index in range(len(tokens) // size):
            content = as_bytes(*tokens[index * size : (index + 1) * size])
            name = self.digest(name + content + self.of_images(request.media, index))
            yield name


def public_name(name: bytes) -> int:
    """The number by which a block is known outside of the engine: routers expect one of 64 bits."""
    return int.from_bytes(name[:8], "big")


def user_key(message: EngineRequest, adapter_content: bytes = b"") -> bytes:
    """Salt and adapter: each part typed by its length. `adapter_content`: what is in it, where that is to count instead
    of its number."""
    # an adapter has another number each time it is loaded: what another version has computed is never found
    adapter = adapter_content or (struct.pack("<q", message.adapter) if message.adapter else b"")
    if not (message.cache_salt or adapter):
        return b""
    return b"".join(struct.pack("<q", len(part)) + part for part in (message.cache_salt.encode(), adapter))


def _name_of(image: Media) -> bytes:
    """Of one length, whatever was sent; all that says what an encoder makes of the bytes is in it, because a core
    trusts no client."""
    cells = (image.length, image.grid, image.merge_size, image.margin, image.line_ends)
    what = (*cells, image.content_hash, image.is_whole, image.is_vectors)
    name = repr(what if image.time is None else (*what, image.time))
    return hashlib.sha256(name.encode()).digest()
