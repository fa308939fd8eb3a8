"""Whether memory grows with the number of requests: samples while a load runs, and a line through the later ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import psutil


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


def sample(pid: int) -> dict[str, int]:
    """Of a server and its engine: memory of each, and what must not pile up."""
    server = psutil.Process(pid)
    children = server.children()
    figures = {"server": server.memory_info().rss, "descriptors": server.num_fds(), "threads": server.num_threads()}
    if children:
        # the first one is the engine; others check forms
        figures["engine"] = children[0].memory_info().rss
    return figures
