"""Whether anything grows with the number of requests: memory while a load runs, and what is left when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
from tests.support.load.figures import metrics_of
from tests.support.shared_memory import shared_files

_LOOK_SECONDS = 0.25
# what must be 0 when nobody asks; a core without a cache has no blocks
_IDLE_GAUGES = (
    "quire:kv_cache_blocks_held",
    "quire:num_requests_running",
    "quire:num_requests_waiting",
    "quire:num_requests_open",
    "quire:queued_requests",
)
_TASKS = "quire:event_loop_tasks"
_ROLES = {
    "engine_core.process": "engine",
    "structured_output.checking_process": "checker",
    "renderer.decoding_process": "decoder",
}


@dataclass
class Growth:
    """Resident memory of one process over the requests that were answered."""

    requests: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def add(self, num_requests: int, num_bytes: int) -> None:
        self.requests.append(num_requests)
        self.num_bytes.append(num_bytes)

    def slope(self) -> tuple[float, float] | None:
        """Bytes a request, and the upper end of its 95 % confidence. None: too few samples."""
        first = len(self.requests) // 5
        xs, ys = self.requests[first:], self.num_bytes[first:]
        count = len(xs)
        if count < 8:
            return None
        mean_x, mean_y = sum(xs) / count, sum(ys) / count
        spread = sum((x - mean_x) ** 2 for x in xs)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
        rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
        return slope, slope + 1.96 * math.sqrt(rest / (count - 2) / spread)


class Processes:
    """A server, its engine, the process that checks forms, whatever else it has started."""

    def __init__(self, pid: int) -> None:
        self._server = psutil.Process(pid)
        self._roles: dict[psutil.Process, str] = {}

    def memory(self) -> dict[str, int]:
        """Resident bytes by role."""
        return {role: process.memory_info().rss for role, process in self._by_role()}

    def counts(self) -> Counter[str]:
        """What must not pile up: descriptors and threads of each, and how many there are."""
        found: Counter[str] = Counter()
        for role, process in self._by_role():
            found[f"processes, {role}"] += 1
            found[f"descriptors, {role}"] += process.num_fds()
            found[f"threads, {role}"] += process.num_threads()
        return found

    def shared_files(self) -> frozenset[str]:
        """Theirs in /dev/shm, and those that nobody has any more."""
        return shared_files([process.pid for _, process in self._by_role()])

    def _by_role(self) -> Iterator[tuple[str, psutil.Process]]:
        yield "server", self._server
        for process in self._server.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process not in self._roles:
                    self._roles[process] = self._role_of(process)
                yield self._roles[process], process

    @staticmethod
    def _role_of(process: psutil.Process) -> str:
        words = " ".join(process.cmdline())
        return next((role for part, role in _ROLES.items() if part in words), "other")


@dataclass
class Inventory:
    """A server of which nobody asks anything: what it holds."""

    counts: Counter[str]
    series: set[str]
    # gauges that are not 0
    busy: dict[str, float]
    # in /dev/shm
    shared: frozenset[str] = frozenset()

    @classmethod
    async def take(cls, place: tuple[str, int], processes: Processes) -> Inventory:
        """Its own question is over before the processes are looked at; of the metrics it has its part each time."""
        values = await metrics_of(place)
        busy = {name: value for name, value in values.items() if value and name.partition("{")[0] in _IDLE_GAUGES}
        counts = processes.counts()
        tasks = sum(value for name, value in values.items() if name.partition("{")[0] == _TASKS)
        counts["tasks of the event loop, server"] = int(tasks)
        return cls(counts, set(values), busy, processes.shared_files())

    def more_than(self, before: Inventory) -> list[str]:
        """By name, what is there that was not there before, or that should not be there at all."""
        found = [f"{name} is {value:g} and not 0" for name, value in self.busy.items()]
        found += [
            f"{name}: {count} and not {before.counts[name]}"
            for name, count in self.counts.items()
            if count > before.counts[name]
        ]
        for what, now, then in (
            ("series of metrics", self.series, before.series),
            ("files in /dev/shm", self.shared, before.shared),
        ):
            if len(now) > len(then):
                found.append(f"{what}: {len(now)} and not {len(then)}: {sorted(now - then)[:5]}")
        return found


async def settled(place: tuple[str, int], processes: Processes, seconds: float = 10.0) -> Inventory:
    """After a warm-up: as soon as two looks are the same and nothing runs, or the last one."""
    end = time.monotonic() + seconds
    before = await Inventory.take(place, processes)
    while time.monotonic() < end:
        await asyncio.sleep(_LOOK_SECONDS)
        now = await Inventory.take(place, processes)
        if now == before and not now.busy:
            break
        before = now
    return before


async def left_over(
    place: tuple[str, int], processes: Processes, before: Inventory, seconds: float
) -> tuple[list[str], float]:
    """After a load: what is more than `before`, once nothing is or the time is over; and how long that took."""
    began = time.monotonic()
    while True:
        found = (await Inventory.take(place, processes)).more_than(before)
        waited = time.monotonic() - began
        if not found or waited >= seconds:
            return found, round(waited, 1)
        await asyncio.sleep(_LOOK_SECONDS)
