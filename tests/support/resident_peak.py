"""How much memory of this process was in RAM at the worst moment of a piece of work."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace


@contextmanager
def resident_peak() -> Iterator[SimpleNamespace]:
    """Its `num_bytes`, once the block has ended: above what was in RAM at its start.

    The kernel's high-water mark, begun anew where it lets us. What the rest of the process gives back meanwhile is
    taken off: a test may ask that the peak is below a bound, never that it is above one.
    """
    peak = SimpleNamespace(num_bytes=0)
    start = _kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    yield peak
    highest = _kilobytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak.num_bytes = max(0, highest - start) * 1024


def _kilobytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
