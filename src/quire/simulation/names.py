"""Names of blocks in a simulation: those that another request can ask for are the engine's own, all others numbers.

A trace says with which contents prompts begin. What lies behind them only the request itself can find again, if it has
given way. Such a name is no hash, no router hears of it, and when the request has ended nobody need keep it: its block
stays cached and gives way in its turn, under no name (`BlockPool.hide`). So memory does not grow with these.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import cast

from quire.chain_hashes import user_key
from quire.engine_core.kv_cache_manager.prefix_cache import PrefixHasher
from quire.engine_core.request import Sequence
from quire.messages import EngineRequest

# A block with fewer tokens of its own may come out like another one by chance.
_FEWEST_OWN_TOKENS = 4
# of a request, in one number with its own
_INDEX_BITS = 24
_packed = struct.Struct(">Q").pack
_OWN_BYTES = 8
# more than any prompt has
ALL_TOKENS = 1 << 40


class TracedRequest(EngineRequest):
    """As a simulation has it: so many of its first tokens may be those of other requests, or of a sibling."""

    num_common_tokens: int = ALL_TOKENS


def own_names(request_id: int, first: int, end: int) -> list[bytes]:
    """Of these blocks of a request, if they are its own."""
    start = request_id << _INDEX_BITS
    return list(map(_packed, range(start + first, start + end)))


def as_it_is(name: bytes) -> int:
    """For a router in this process the name of a block serves as well as a number of its own, which takes memory."""
    return cast("int", name)


def common_names(names: list[int]) -> list[int]:
    """Those of these, as they are, that another request can ask for."""
    return cast("list[int]", [name for name in cast("list[bytes]", names) if len(name) > _OWN_BYTES])


class TraceHasher(PrefixHasher):
    """Of a request that comes from elsewhere all blocks may be others'."""

    def hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        message = sequence.request.message
        num_common = self._num_common_blocks(message)
        if num_blocks <= num_common:
            return super().hashes(sequence, num_blocks)
        known = sequence.block_hashes
        if len(known) < num_common:
            super().hashes(sequence, num_common)
        if len(known) < num_blocks:
            known += own_names(message.request_id, len(known), num_blocks)
        return known if len(known) == num_blocks else known[:num_blocks]

    def add_next(self, sequence: Sequence, index: int, content: bytes) -> bytes:
        message = sequence.request.message
        if index < self._num_common_blocks(message):
            return super().add_next(sequence, index, content)
        (name,) = own_names(message.request_id, index, index + 1)
        sequence.block_hashes.append(name)
        return name

    def names_of(self, request: EngineRequest) -> Iterator[bytes]:
        """None, if no other request can ask for any."""
        num_common = self._num_common_blocks(request)
        if num_common:
            tokens = request.prompt_token_ids
            # requests of a simulation have neither tenants nor images
            yield from self.chain(self.root(user_key(request)), tokens[: num_common * self.block_size])
            yield from own_names(request.request_id, num_common, len(tokens) // self.block_size)

    def _num_common_blocks(self, request: EngineRequest) -> int:
        num_tokens = request.num_common_tokens if isinstance(request, TracedRequest) else ALL_TOKENS
        return (num_tokens + _FEWEST_OWN_TOKENS - 1) // self.block_size
