"""The first tier: blocks in memory, bounded in bytes.

Knows names and bytes. Engines and threads of input and output share it, so each operation holds a lock. The least
recently used block leaves first; one that is pinned, because a request waits for it or is about to load it, does not.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from quire.kv_connectors.tiered.payload import Payload

NearBlock = tuple[bytes, Payload]


class HostTier:
    """`put` answers False where there is no room beside what is pinned: nothing here grows beyond its bound."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self._blocks: OrderedDict[bytes, Payload] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        # of blocks that are here and pinned
        self._num_pinned_bytes = 0
        # on their way into a cache, whatever becomes of their names
        self._lent: dict[int, list[Payload]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def put(self, name: bytes, payload: Payload) -> bool:
        with self._lock:
            if name in self._blocks:
                self._blocks.move_to_end(name)
                return True
            if not self._make_room(payload.nbytes):
                return False
            self._blocks[name] = payload
            self.num_bytes += payload.nbytes
            self._num_pinned_bytes += payload.nbytes if name in self._pins else 0
            return True

    def _make_room(self, num_bytes: int) -> bool:
        if self._num_pinned_bytes + num_bytes > self.max_bytes:
            return False
        while self.num_bytes + num_bytes > self.max_bytes:
            name = next(iter(self._blocks))
            if name in self._pins:
                self._blocks.move_to_end(name)
                continue
            self.num_bytes -= self._blocks.pop(name).nbytes
            self.num_evicted += 1
        return True

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def missing(self, names: Iterable[bytes]) -> list[bytes]:
        with self._lock:
            return [name for name in names if name not in self._blocks]

    def near(self, names: Iterable[bytes]) -> list[NearBlock]:
        """Those of these, from the first on, that are here. Whoever has them has them, whatever leaves meanwhile."""
        near: list[NearBlock] = []
        with self._lock:
            for name in names:
                payload = self._blocks.get(name)
                if payload is None:
                    break
                near.append((name, payload))
        return near

    def pin(self, names: Iterable[bytes]) -> None:
        """None of these leaves, whether it is here or comes later, before it is unpinned as often."""
        with self._lock:
            for name in names:
                if name not in self._pins:
                    self._num_pinned_bytes += self._bytes_of(name)
                self._pins[name] += 1

    def unpin(self, names: Iterable[bytes]) -> None:
        with self._lock:
            for name in names:
                self._pins[name] -= 1
                if not self._pins[name]:
                    del self._pins[name]
                    self._num_pinned_bytes -= self._bytes_of(name)

    def _bytes_of(self, name: bytes) -> int:
        payload = self._blocks.get(name)
        return 0 if payload is None else payload.nbytes

    def lend(self, near: Sequence[NearBlock]) -> int:
        """A number by which these can be taken once. Other threads may have put something in their place by now."""
        with self._lock:
            number = next(self._numbers)
            self._lent[number] = [payload for _, payload in near]
            for name, _ in near:
                if name in self._blocks:
                    self._blocks.move_to_end(name)
            return number

    def take(self, number: int) -> list[Payload]:
        with self._lock:
            return self._lent.pop(number)
