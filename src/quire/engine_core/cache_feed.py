"""Tells those outside, after each step, what the prefix cache has gained and lost: the client of the core, where it
chooses between several, and whoever subscribes to KV events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.engine_core.kv_cache_manager.cache_changes import CacheChangeLog
from quire.engine_core.step_observer import StepObserver
from quire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.messages import CacheChanged

if TYPE_CHECKING:
    from quire.engine_core.kv_event_publisher import KVEventPublisher


class CacheFeed(StepObserver):
    def __init__(self, log: CacheChangeLog, publisher: KVEventPublisher | None, *, tells_client: bool) -> None:
        # what the pool is told
        self.changes = log
        self._publisher = publisher
        self._tells_client = tells_client
        self._tell: Callable[[CacheChanged], None] | None = None

    def watch(self, tell: Callable[[CacheChanged], None], name: Callable[[bytes], int] | None = None) -> None:
        """`name`: how it wants to hear of a name, if not by the public one."""
        if self._tells_client:
            self._tell = tell
            self.changes.public_name = name or self.changes.public_name

    def held(self) -> CacheChanged | None:
        """What `watch` has told of, for one that comes later."""
        names = self.changes.told() if self._tells_client else []
        return CacheChanged(stored=names) if names else None

    def settled(self) -> None:
        events = self.changes.take()
        if not events:
            return
        if self._publisher is not None:
            self._publisher.publish(events)
        if self._tell is not None:
            self._tell(_as_message(events))

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _as_message(events: list[KVEvent]) -> CacheChanged:
    stored: list[int] = []
    removed: list[int] = []
    is_cleared = False
    for event in events:
        match event:
            case BlockStored():
                stored += event.block_hashes
            case BlockRemoved():
                removed += event.block_hashes
            case AllBlocksCleared():
                is_cleared = True
    return CacheChanged(stored=stored, removed=removed, is_cleared=is_cleared)
