"""Events of the prefix cache as vLLM publishes them, so that routers made for it work with Quire.

A batch is [time, events, number of the replica], packed with MessagePack. Since its version 0.23 vLLM packs each event
as a map of its fields, before as an array in the order of the fields: `packed` does either. Names and order of the
fields are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

# where a block lies: routers weigh other media than the first one less
MEDIUM = "GPU"


class _Event(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Root of all; the class name travels as the tag `type`."""


class BlockStored(_Event):
    """Full blocks that are found from now on, one behind the other."""

    block_hashes: list[int]
    # None: they begin a prompt
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = msgspec.field(default_factory=lambda: MEDIUM)
    lora_name: str | None = msgspec.field(default_factory=lambda: None)
    # for each block what else makes its content, as an opaque word; None: its tokens alone
    extra_keys: list[tuple[Any, ...] | None] = []


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None = msgspec.field(default_factory=lambda: MEDIUM)


class AllBlocksCleared(_Event):
    """None is found any more."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None


_encoder = msgspec.msgpack.Encoder()


def packed(events: Sequence[KVEvent], when: float, replica: int, *, as_maps: bool = True) -> bytes:
    """One batch, as it is published."""
    return _encoder.encode(_Batch(when, list(events) if as_maps else [_as_array(event) for event in events], replica))


def _as_array(event: KVEvent) -> list[Any]:
    return [type(event).__name__, *msgspec.structs.astuple(event)]
