"""What one engine waits for: blocks that are read from the stores into host memory, by threads of their own.

Asked, and answered at once, while a step is decided. The wait is over when all that can be had is near, or when it has
been as long as is worth it: then the request takes its place in line, and blocks may go on coming until it begins. What
is near by then is loaded, and the rest is computed.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from quire.kv_connectors.tiered.guard import GuardedStore
from quire.kv_connectors.tiered.tiers import BATCH_BYTES, MOST_IN_BATCH, Tiers

logger = logging.getLogger("quire.kv_connectors")

_NUM_READERS = 4
# so many blocks are asked for at first: most prompts are new, and a question may cost a message for each block
_FEW = 8
# whatever computing takes, a store gets as long to answer
_LEAST_WAIT = 0.05
# what somebody is about to put there is looked for so often
_LOOK_AGAIN_SECONDS = 0.01
_WAIT_SECONDS = 0.002


@dataclass
class _Question:
    number: int
    names: list[bytes]
    deadline: float
    is_expected: bool
    # a thread is at it
    is_read: bool = False
    # nobody needs the answer any more
    is_over: bool = False


class Questions:
    """By number, which is whatever the engine says. `clock` in seconds."""

    def __init__(self, tiers: Tiers, clock: Callable[[], float] = time.monotonic) -> None:
        self._tiers = tiers
        self._host = tiers.host
        self._clock = clock
        self._always = tiers.settings.rule == "always"
        # guards what follows; told of when a question is over
        self._changed = threading.Condition()
        self._open: dict[int, _Question] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._arrived: list[int] = []
        self._pinned: dict[int, list[bytes]] = {}
        # by number, until it is forgotten
        self._asked: dict[int, _Question] = {}
        # threads at a question whose wait is over: they may hang
        self._num_overdue = 0
        self._counts = Counter(dict.fromkeys(("hits", "misses", "late"), 0))
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="quire-kv-reader")
        tiers.end_with_these(self._readers)

    # ------------------------------------------------------------------------------------------ of the engine

    def ask(self, number: int, names: list[bytes], *, is_expected: bool = False) -> bool:
        """Whether these may come nearer, and are worth the wait. What is near, and what comes, stays until `forget`."""
        self.forget(number)
        missing = self._host.missing(names)
        self._pinned[number] = names
        self._host.pin(names)
        if not missing or not any(self._may_read(store, len(missing), is_expected) for store in self._tiers.stores):
            return False
        with self._changed:
            # threads that hang in a store must not make everybody wait for nothing
            if self._tiers.is_closed or self._num_overdue >= _NUM_READERS:
                return False
            question = _Question(number, names, self._clock() + self._patience(len(missing)), is_expected)
            self._open[number] = self._asked[number] = question
            heapq.heappush(self._deadlines, (question.deadline, number))
            self._readers.submit(self._bring, question)
        return True

    def _may_read(self, store: GuardedStore, num_blocks: int, is_expected: bool) -> bool:
        """It is there to be asked, and reads so many blocks sooner than they are computed."""
        if not store.may_be_asked or self._always or is_expected:
            return store.may_be_asked
        # one call to ask, and one to read
        seconds = store.seconds_for(num_blocks * self._tiers.bytes_per_block, 2)
        return seconds < num_blocks * self._tiers.seconds_per_block

    def _patience(self, num_blocks: int) -> float:
        """As long as computing takes: so nobody waits much longer than twice as long as without a store."""
        most = self._tiers.settings.max_wait
        return most if self._always else min(most, max(_LEAST_WAIT, num_blocks * self._tiers.seconds_per_block))

    def arrived(self) -> list[int]:
        """Numbers whose wait is over."""
        if not self._open and not self._arrived:
            return []
        with self._changed:
            now = self._clock()
            arrived, self._arrived = self._arrived, []
            while self._deadlines and self._deadlines[0][0] <= now:
                _, number = heapq.heappop(self._deadlines)
                if (question := self._open.pop(number, None)) is not None:
                    self._num_overdue += question.is_read
                    self._counts["late"] += 1
                    arrived.append(number)
            return arrived

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._arrived, _WAIT_SECONDS)

    def forget(self, number: int) -> None:
        if (names := self._pinned.pop(number, None)) is None:
            return
        self._host.unpin(names)
        with self._changed:
            if (asked := self._asked.pop(number, None)) is not None:
                asked.is_over = True
            if (question := self._open.pop(number, None)) is not None:
                self._num_overdue += question.is_read

    def statistics(self) -> dict[str, float]:
        with self._changed:
            return {f"kv_tiers_{what}_total": count for what, count in self._counts.items()}

    # ------------------------------------------------------------------------------------------ of the threads

    def _bring(self, question: _Question) -> None:
        with self._changed:
            question.is_read = True
            # one that has waited behind others until now is late, but no thread hangs because of it
            self._num_overdue += not self._is_open(question)
        try:
            may_come = not question.is_over and not self._bring_once(question) and question.is_expected
        except Exception:
            logger.exception("what lies in the stores could not be brought")
            may_come = False
        if may_come:
            time.sleep(_LOOK_AGAIN_SECONDS)
        if not may_come or not self._asked_again(question):
            self._end(question)

    def _asked_again(self, question: _Question) -> bool:
        """Behind all others: what does not come must not keep a thread from what is there."""
        with self._changed:
            if not self._is_open(question) or self._tiers.is_closed:
                return False
            question.is_read = False
            self._readers.submit(self._bring, question)
            return True

    def _end(self, question: _Question) -> None:
        num_missing = len(self._host.missing(question.names))
        with self._changed:
            self._counts["misses"] += num_missing
            if self._is_open(question):
                del self._open[question.number]
                self._arrived.append(question.number)
            else:
                self._num_overdue -= 1
            self._changed.notify_all()

    def _is_open(self, question: _Question) -> bool:
        """Somebody waits for it, and for no later one of the same number."""
        return self._open.get(question.number) is question

    def _bring_once(self, question: _Question) -> bool:
        """Whether all is near."""
        where: dict[bytes, GuardedStore] = {}
        missing = self._host.missing(question.names)
        for store in self._tiers.stores:
            unknown = [name for name in missing if name not in where]
            if unknown and self._may_read(store, len(unknown), question.is_expected):
                where.update(dict.fromkeys(_found_in(store, unknown), store))
        # behind one that is nowhere, nothing is of use
        is_missing = set(missing)
        reach = next((i for i, one in enumerate(question.names) if one in is_missing and one not in where), None)
        wanted = [name for name in question.names[:reach] if name in is_missing]
        for store, batch in self._batches(wanted, where):
            if question.is_over:
                return False
            found = store.get(batch)
            for name in batch:
                payload = found.get(name)
                if payload is not None and not self._tiers.fits(name, payload):
                    store.delete([name])
                    return False
                if payload is None or not self._host.put(name, payload):
                    return False
                self._tiers.bytes_per_block = payload.nbytes
            with self._changed:
                self._counts["hits"] += len(batch)
            self._tiers.bring_nearer(store, found)
        return reach is None

    def _batches(
        self, names: list[bytes], where: dict[bytes, GuardedStore]
    ) -> Iterator[tuple[GuardedStore, list[bytes]]]:
        """Neighbours from one store, as many as a call should have."""
        most = max(1, min(MOST_IN_BATCH, BATCH_BYTES // max(1, self._tiers.bytes_per_block)))
        batch: list[bytes] = []
        for name in names:
            if batch and (len(batch) == most or where[name] is not where[batch[0]]):
                yield where[batch[0]], batch
                batch = []
            batch.append(name)
        if batch:
            yield where[batch[0]], batch


def _found_in(store: GuardedStore, names: list[bytes]) -> set[bytes]:
    """Those that are there, up to where the first ones are missing."""
    found: set[bytes] = set()
    start, end = 0, _FEW
    while start < len(names):
        asked = names[start:end]
        there = store.exists(asked)
        found |= there
        if len(there) < len(asked):
            break
        start, end = end, end + MOST_IN_BATCH
    return found
