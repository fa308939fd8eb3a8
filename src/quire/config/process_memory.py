"""Memory as this process may really use it: the machine's, or less inside a container (Linux).

The free memory of a container is its limit minus what it uses; pages of files do not count, because the kernel gives
them back. Both versions of control groups are read, and every group on the way up to the root can be the narrow one.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, replace
from pathlib import Path

# Version 1 says "no limit" as a number near 2**63.
_UNLIMITED = 2**60
# A library with more code than this hardly uses any of it once it is imported.
_LARGE_CODE = 8 << 20


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that there are, and those still free to this process; `limit` says what sets the bound."""

    total_bytes: int
    free_bytes: int
    limit: str
    # what this process has taken; None: all that is not free counts as its own
    process_bytes: int | None = None

    @property
    def own_bytes(self) -> int:
        return self.total_bytes - self.free_bytes if self.process_bytes is None else self.process_bytes


def process_memory(root: Path = Path("/")) -> MemoryReport:
    """`root` is where /proc and /sys are found; a test puts its own there."""
    machine = _fields(root / "proc/meminfo", scale=1024)
    total = machine.get("MemTotal", 0)
    available = machine.get("MemAvailable", machine.get("MemFree", 0))
    report = MemoryReport(total, available, "the machine's memory", _own_bytes(root))
    for group, version in _control_groups(root):
        limit, used = _limit_and_use(group, version)
        if limit is None:
            continue
        free = min(report.free_bytes, max(0, limit - used))
        if limit < report.total_bytes:
            report = replace(report, total_bytes=limit, free_bytes=free, limit="the container's memory limit")
        elif free < report.free_bytes:
            report = replace(report, free_bytes=free)
    return report


def resident_bytes_of_process() -> int:
    """In memory, pages of files included."""
    return _fields(Path("/proc/self/status"), scale=1024).get("VmRSS", 0)


def give_back_freed() -> None:
    """What was freed goes back to the system, and what was read of large libraries. The C library keeps it in reserve,
    for as long as something behind it lives; where there is another one than glibc, nothing happens."""
    system = ctypes.CDLL(None)
    trim = getattr(system, "malloc_trim", None)
    if trim is None:
        return
    trim(ctypes.c_size_t(0))
    for start, num_bytes in _large_codes(Path("/proc/self/maps")):
        # pages of a file that nobody has written to: what runs there next is found where the system keeps the file
        system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)


def _large_codes(maps: Path) -> list[tuple[int, int]]:
    """(address, bytes) of the code of large libraries in this process. Of torch's 54 MB are read when it registers its
    operators; they are in memory once for all processes, and each counts them as its own."""
    codes = []
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        span, rights, _, _, _, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in span.split("-"))
        if rights == "r-xp" and path and path[0].startswith("/") and end - start >= _LARGE_CODE:
            codes.append((start, end - start))
    return codes


def _own_bytes(root: Path) -> int:
    """Pages that this process alone has. Those of files are no burden: the kernel gives them back."""
    status = _fields(root / "proc/self/status", scale=1024)
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def _fields(file: Path, *, scale: int = 1) -> dict[str, int]:
    """`name: number` or `name number` by line."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    fields = {}
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0]] = int(words[1]) * scale
    return fields


def _control_groups(root: Path) -> list[tuple[Path, int]]:
    """Directories of the groups that this process is in, innermost first, each up to the root of its hierarchy."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[tuple[Path, int]] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top = root / "sys/fs/cgroup"
            version = 2
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            version = 1
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # Inside a container the path may be the host's; then only the root of the hierarchy is there.
        found += [(top.joinpath(*parts[:depth]), version) for depth in range(len(parts), -1, -1)]
    return found


def _limit_and_use(group: Path, version: int) -> tuple[int | None, int]:
    limit_name, use_name = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    try:
        limit = (group / limit_name).read_text().strip()
        use = int((group / use_name).read_text())
    except (OSError, ValueError):
        return None, 0
    if not limit.isdigit() or int(limit) >= _UNLIMITED:
        return None, 0
    stat = _fields(group / "memory.stat")
    prefix = "total_" if version == 1 else ""
    files = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return int(limit), max(0, use - files)
