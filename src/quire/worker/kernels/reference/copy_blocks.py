"""Copy blocks within caches: copy-on-write, all copies of a step at once (3.4.5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor


def copy_blocks(caches: Sequence[Tensor], pairs_N2: Tensor) -> None:
    """For each pair (source, destination) in order, for each cache: cache[destination] = cache[source].

    The order counts: a destination may be the source of a later pair. Pairs belong into host memory, where the
    scheduler made them; otherwise this call waits for the device.
    """
    for sources, destinations in independent_runs(pairs_N2.tolist()):
        for cache in caches:
            cache[destinations] = cache[sources]


def independent_runs(pairs: list[list[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Cut the pairs into runs in which no pair needs or overwrites what an earlier one wrote; usually there is one."""
    sources: list[int] = []
    destinations: list[int] = []
    written: set[int] = set()
    for source, destination in pairs:
        if source in written or destination in written:
            yield sources, destinations
            sources, destinations, written = [], [], set()
        sources.append(source)
        destinations.append(destination)
        written.add(destination)
    if sources:
        yield sources, destinations
