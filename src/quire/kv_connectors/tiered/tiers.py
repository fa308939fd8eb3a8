"""The tiers of one process: host memory, the stores behind it, and the threads that write to them.

The worker half hands over bytes and takes them from memory, and never waits for a store. What may pile up is bounded in
bytes: what lies in memory, and what waits to be written, for each store. Beyond that a block is not written. Who reads:
questions.py.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from weakref import WeakSet, WeakValueDictionary

from quire.config import shared_key
from quire.kv_connectors.connector import CacheLayout
from quire.kv_connectors.tiered.guard import GuardedStore
from quire.kv_connectors.tiered.host import HostTier
from quire.kv_connectors.tiered.namespace import NAMESPACE_BYTES, namespace_of
from quire.kv_connectors.tiered.payload import Frames, Payload
from quire.kv_connectors.tiered.settings import TierSettings
from quire.kv_connectors.tiered.stores import open_store

# for one call: enough that its own time hardly counts, little enough that what is late stops soon
BATCH_BYTES = 8 << 20
MOST_IN_BATCH = 64
# what waits to be written, for each store
_QUEUE_BYTES = 256 << 20
_CLOSE_SECONDS = 5.0


@dataclass
class _Writer:
    """What waits for one store, and the thread that writes it. Bounded in bytes."""

    store: GuardedStore
    waiting: deque[tuple[bytes, Payload]] = field(default_factory=deque)
    # what is being written included
    num_bytes: int = 0


class Tiers:
    """`stores`: the nearest first."""

    def __init__(self, settings: TierSettings, stores: list[GuardedStore]) -> None:
        self.host = HostTier(settings.host_bytes)
        self.settings = settings
        self.stores = stores
        # what computing a block's tokens takes, and what it holds: known before the first one is written
        self.seconds_per_block = 0.0
        self.bytes_per_block = 0
        self.is_closed = False
        # what a block holds, by namespace
        self._block_bytes: dict[bytes, int] = {}
        # guards what follows; told of when something is to be written, or is
        self._changed = threading.Condition()
        self._num_not_written = 0
        self._writers = [_Writer(store) for store in stores]
        self._threads: list[threading.Thread] = []
        # threads of the engines that read from here
        self._readers: WeakSet[ThreadPoolExecutor] = WeakSet()
        self._num_users = 0

    # ------------------------------------------------------------------------------------------ who uses them

    def enter(self) -> None:
        """A worker half writes and takes from now on."""
        with self._changed:
            self._num_users += 1
            if self._threads or not self.stores:
                return
            self._threads = [
                threading.Thread(target=self._write, args=(writer,), name=f"quire-kv-{writer.store.kind}", daemon=True)
                for writer in self._writers
            ]
        for thread in self._threads:
            thread.start()

    def end_with_these(self, readers: ThreadPoolExecutor) -> None:
        """Threads that read from here end when nobody writes here any more, not only when they are collected."""
        self._readers.add(readers)

    def leave(self) -> None:
        """The last one that leaves waits for what is to be written, for a while, and closes the stores."""
        with self._changed:
            self._num_users -= 1
            if self._num_users or self.is_closed:
                return
        self.flush(_CLOSE_SECONDS)
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        for readers in list(self._readers):
            readers.shutdown(wait=False, cancel_futures=True)
        for store in self.stores:
            store.close()

    def flush(self, seconds: float) -> bool:
        """Whether all that was handed over is written by then, as far as the stores take it."""
        with self._changed:
            return self._changed.wait_for(self._has_written_all, seconds)

    def _has_written_all(self) -> bool:
        return not any(writer.num_bytes for writer in self._writers)

    def open(self, layout: CacheLayout, block_bytes: int) -> None:
        """A worker half reads and writes blocks of so many bytes."""
        self._block_bytes[namespace_of(layout)] = block_bytes

    def fits(self, name: bytes, payload: Payload) -> bool:
        """A block of that name can hold it. Another version of this program may keep other bytes under it."""
        return self._block_bytes.get(name[:NAMESPACE_BYTES], payload.nbytes) == payload.nbytes

    # ------------------------------------------------------------------------------------------ writing

    def wants(self, name: bytes) -> bool:
        return name not in self.host

    def put(self, payloads: Mapping[bytes, Payload]) -> None:
        """Into memory at once, and on the way to each store that gives it back sooner than it is computed."""
        for name, payload in payloads.items():
            self.bytes_per_block = payload.nbytes
            self.host.put(name, payload)
        with self._changed:
            for writer in self._writers:
                self._hand_to(writer, payloads)
            self._changed.notify_all()

    def bring_nearer(self, source: GuardedStore, found: Mapping[bytes, Payload]) -> None:
        """What came from far is written to the stores before that one: it will be asked for again."""
        with self._changed:
            for writer in self._writers[: self.stores.index(source)]:
                self._hand_to(writer, found)
            self._changed.notify_all()

    def _hand_to(self, writer: _Writer, payloads: Mapping[bytes, Payload]) -> None:
        for name, payload in payloads.items():
            is_full = writer.num_bytes + payload.nbytes > _QUEUE_BYTES
            if is_full or not writer.store.may_be_asked or not self._is_worth(writer.store, payload.nbytes):
                self._num_not_written += 1
                continue
            writer.waiting.append((name, payload))
            writer.num_bytes += payload.nbytes

    def _is_worth(self, store: GuardedStore, num_bytes: int) -> bool:
        """Reading a block, among others, takes less time than computing its tokens."""
        return self.settings.rule == "always" or store.seconds_for(num_bytes, 0) < self.seconds_per_block

    def _write(self, writer: _Writer) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: writer.waiting or self.is_closed)
                if self.is_closed:
                    return
                batch, num_bytes = _take_batch(writer)
            there = writer.store.exists(list(batch))
            missing = {name: payload for name, payload in batch.items() if name not in there}
            if missing:
                writer.store.put(missing)
            with self._changed:
                writer.num_bytes -= num_bytes
                self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ what can be seen

    def statistics(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for store in self.stores:
            found.update(store.statistics())
        with self._changed:
            num_waiting = sum(writer.num_bytes for writer in self._writers)
        return {
            **found,
            "kv_tiers_not_written_total": self._num_not_written,
            "kv_tiers_waiting_bytes": num_waiting,
            "kv_host_tier_bytes": self.host.num_bytes,
            "kv_host_tier_blocks": len(self.host),
            "kv_host_tier_evicted_total": self.host.num_evicted,
        }


def _take_batch(writer: _Writer) -> tuple[dict[bytes, Payload], int]:
    """Blocks, and their bytes."""
    batch: dict[bytes, Payload] = {}
    num_bytes = 0
    while writer.waiting and len(batch) < MOST_IN_BATCH and num_bytes < BATCH_BYTES:
        name, payload = writer.waiting.popleft()
        batch[name] = payload
        num_bytes += payload.nbytes
    return batch, num_bytes


_opened: WeakValueDictionary[TierSettings, Tiers] = WeakValueDictionary()
_opening = threading.Lock()


def open_tiers(settings: TierSettings) -> Tiers:
    """Those of this process with these settings: both halves of an engine find the same ones."""
    with _opening:
        tiers = _opened.get(settings)
        if tiers is None or tiers.is_closed:
            frames = Frames(shared_key("checksums"))
            stores = [GuardedStore(address, open_store(address), frames) for address in settings.stores]
            tiers = _opened[settings] = Tiers(settings, stores)
        return tiers
