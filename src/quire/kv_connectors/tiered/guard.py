"""One store behind a wall: what it loses, breaks or takes too long for is only missing.

Adds to the five calls what every store needs: names as text, checksums, a breaker, and the measure of what it costs.
Nothing here raises. Called by the threads of the tiers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from quire.kv_connectors.tiered.breaker import Breaker
from quire.kv_connectors.tiered.namespace import NAMESPACE_BYTES
from quire.kv_connectors.tiered.payload import Frames, Payload
from quire.kv_connectors.tiered.stores import kind_of
from quire.kv_connectors.tiered.stores.store import Store

logger = logging.getLogger("quire.kv_connectors")
# of what is measured, the newest counts for so much
_NEWEST = 0.3
_TELL_AGAIN_SECONDS = 60.0
_COUNTS = ("hits", "read_bytes", "written_bytes", "failures", "corrupt")
_Answer = TypeVar("_Answer")


class GuardedStore:
    """A store and what is known of it."""

    def __init__(self, address: str, store: Store, frames: Frames, clock: Callable[[], float] = time.monotonic) -> None:
        self.kind = kind_of(address)
        self._store = store
        self._frames = frames
        self._clock = clock
        self._breaker = Breaker(clock)
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(_COUNTS, 0))
        # a failure that opens no breaker is logged from then on
        self._tells_from = -math.inf
        # seconds: of a question, and of a byte that is read; 0.0: not known yet, and taken for nothing
        self._seconds_per_call = 0.0
        self._seconds_per_byte = 0.0

    @property
    def may_be_asked(self) -> bool:
        return not self._breaker.rests

    def seconds_for(self, num_bytes: int, num_calls: int = 1) -> float:
        """What reading so much takes, as far as is known."""
        return num_calls * self._seconds_per_call + num_bytes * self._seconds_per_byte

    def exists(self, names: list[bytes]) -> set[bytes]:
        def ask() -> list[bool]:
            return _one_each(names, self._store.exists_many(list(map(_text_of, names))))

        found, seconds = self._timed(ask, [False] * len(names))
        there = {name for name, is_there in zip(names, found, strict=True) if is_there}
        if seconds is not None:
            with self._lock:
                self._seconds_per_call = _mean(self._seconds_per_call, seconds)
        return there

    def get(self, names: list[bytes]) -> dict[bytes, Payload]:
        """Those of them that are there and whole. What is broken is removed, so that it is written anew."""

        def read() -> list[bytes | None]:
            return _one_each(names, self._store.get_many(list(map(_text_of, names))))

        nothing: list[bytes | None] = [None] * len(names)
        values, seconds = self._timed(read, nothing)
        found = {}
        broken = []
        num_bytes = 0
        for name, value in zip(names, values, strict=True):
            if value is None:
                continue
            num_bytes += len(value)
            payload = self._frames.unwrap(name, value)
            if payload is None:
                broken.append(name)
            else:
                found[name] = payload
        with self._lock:
            self._counts["hits"] += len(found)
            self._counts["read_bytes"] += num_bytes
            self._counts["corrupt"] += len(broken)
            if seconds is not None and num_bytes:
                self._seconds_per_byte = _mean(self._seconds_per_byte, seconds / num_bytes)
        if broken:
            logger.warning("kv store %s: %d blocks are broken, and are computed anew", self.kind, len(broken))
            self.delete(broken)
        return found

    def put(self, payloads: dict[bytes, Payload]) -> None:
        values = [(_text_of(name), self._frames.wrap(name, payload)) for name, payload in payloads.items()]
        _, seconds = self._timed(lambda: self._store.put_many(values), None)
        num_bytes = sum(len(value) for _, value in values)
        with self._lock:
            self._counts["written_bytes"] += num_bytes if seconds is not None else 0
            if seconds is not None and not self._counts["read_bytes"]:
                # until something is read, writing is the nearest measure that there is
                self._seconds_per_byte = _mean(self._seconds_per_byte, seconds / num_bytes)

    def delete(self, names: list[bytes]) -> None:
        self._timed(lambda: self._store.delete(list(map(_text_of, names))), None)

    def statistics(self) -> dict[str, float]:
        with self._lock:
            counts = dict(self._counts)
        return {
            **{f"kv_store_{self.kind}_{what}_total": count for what, count in counts.items()},
            f"kv_store_{self.kind}_breaker_openings_total": self._breaker.num_openings,
            f"kv_store_{self.kind}_resting": float(self._breaker.is_open),
        }

    def close(self) -> None:
        try:
            self._store.close()
        except Exception:
            logger.warning("kv store %s: could not be closed", self.kind, exc_info=True)

    def _timed(self, call: Callable[[], _Answer], otherwise: _Answer) -> tuple[_Answer, float | None]:
        """What the store says, and how long it took; `otherwise` and None if it is left alone or fails."""
        if not self._breaker.lets_in():
            return otherwise, None
        start = self._clock()
        try:
            answer = call()
        except Exception as error:
            # Any: a library of somebody else's, over a network.
            was_open = self._breaker.is_open
            self._breaker.failed()
            with self._lock:
                self._counts["failures"] += 1
            if self._breaker.is_open and not was_open:
                logger.warning(
                    "kv store %s: left alone for a while, and what it has is computed (%s: %s)",
                    self.kind, type(error).__name__, error,
                )  # fmt: skip
            elif not was_open:
                self._tell(error)
            return otherwise, None
        self._breaker.succeeded()
        return answer, self._clock() - start

    def _tell(self, error: Exception) -> None:
        """One that is full is read and not written, and no breaker opens: between two writes a question succeeds."""
        now = self._clock()
        if now < self._tells_from:
            return
        self._tells_from = now + _TELL_AGAIN_SECONDS
        logger.warning("kv store %s: a call has failed (%s: %s)", self.kind, type(error).__name__, error)


def _one_each(names: list[bytes], answers: list[_Answer]) -> list[_Answer]:
    if len(answers) != len(names):
        raise ValueError(f"{len(answers)} answers to a question for {len(names)} blocks")
    return answers


def _mean(before: float, newest: float) -> float:
    return newest if not before else (1 - _NEWEST) * before + _NEWEST * newest


def _text_of(name: bytes) -> str:
    """Of one engine's layout and rank a folder of its own, in it a folder for each first byte of a name."""
    layout, block = name[:NAMESPACE_BYTES].hex(), name[NAMESPACE_BYTES:].hex()
    return f"{layout}/{block[2:4]}/{block}"
