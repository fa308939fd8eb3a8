"""Which processors this process may compute on, and how many threads that is worth (Linux; elsewhere a bare count).

Two things bind a process: the processors that it may run on at all (affinity, cpusets), and in a container the time on
them (a quota). Two hardware threads of one core share its arithmetic units, so one thread a core is enough. The order
is node by node of a machine with several memories, so that neighbours among threads are neighbours in memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Processors:
    """`cores`: the first hardware thread of each core, node by node. `quota`: processors' worth of time, or None."""

    cores: tuple[int, ...]
    quota: float | None = None
    num_nodes: int = 1

    @property
    def num_threads(self) -> int:
        """As many as can run at the same time, all the time."""
        if self.quota is None:
            return len(self.cores)
        return max(1, min(len(self.cores), round(self.quota)))

    @property
    def reason(self) -> str:
        """Where the number comes from, in words."""
        if self.quota is not None and self.num_threads < len(self.cores):
            return f"the container grants the time of {self.quota:g} of {len(self.cores)} cores"
        nodes = f", on {self.num_nodes} memory nodes" if self.num_nodes > 1 else ""
        return f"cores that this process may use{nodes}"

    def pinned(self, num_threads: int) -> tuple[int, ...] | None:
        """A processor for each thread, if all are ours alone to choose from: fewer threads than cores leave a choice
        that the system makes better, and with a quota others compute on the same cores."""
        return self.cores if num_threads == len(self.cores) > 1 and self.quota is None else None


def processors(root: Path = Path("/")) -> Processors:
    """`root` is where /proc and /sys are found; a test puts its own there."""
    if not hasattr(os, "sched_getaffinity"):
        return Processors(tuple(range(os.cpu_count() or 1)))
    allowed = sorted(os.sched_getaffinity(0))
    nodes = _nodes(root)
    cores: list[tuple[int, int]] = []
    seen: set[int] = set()
    for cpu in allowed:
        if cpu not in seen:
            siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            seen.update(_number_list(_text(siblings)) or {cpu})
            cores.append((nodes.get(cpu, 0), cpu))
    ordered = tuple(cpu for _, cpu in sorted(cores))
    return Processors(ordered, _quota(root), len({node for node, _ in cores}))


def keep_near(cores: Sequence[int], root: Path = Path("/")) -> None:
    """Keeps this thread, and those that it starts from now on, to the memory nodes of these processors. What they touch
    first lies there too: a system gives a thread the memory that is nearest. On a machine of one node, and for a worker
    that has processors of all nodes, nothing changes."""
    nodes = _nodes(root)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    own = {nodes.get(cpu, 0) for cpu in cores}
    if own >= {nodes.get(cpu, 0) for cpu in allowed}:
        return
    # its own in any case: who started this process may keep to another node
    wanted = {cpu for cpu in allowed if nodes.get(cpu, 0) in own} | set(cores)
    # refused by some containers: then the system places its threads
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, wanted)


def _nodes(root: Path) -> dict[int, int]:
    folder = root / "sys/devices/system/node"
    nodes: dict[int, int] = {}
    for node in folder.glob("node[0-9]*"):
        for cpu in _number_list(_text(node / "cpulist")):
            nodes[cpu] = int(node.name.removeprefix("node"))
    return nodes


def _quota(root: Path) -> float | None:
    """The narrowest of the groups from this process up to the root, in either version of control groups."""
    quotas: list[float] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            quotas += _quota_of(top.joinpath(*parts[:depth]), is_version_2=not controllers)
    return min(quotas, default=None)


def _quota_of(group: Path, *, is_version_2: bool) -> list[float]:
    if is_version_2:
        words = _text(group / "cpu.max").split()
    else:
        words = [_text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return []  # "max", -1, or no such file
    return [int(words[0]) / int(words[1])]


def _number_list(text: str) -> set[int]:
    """0-3,8 and the like."""
    numbers: set[int] = set()
    for piece in text.strip().split(","):
        first, _, last = piece.partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
