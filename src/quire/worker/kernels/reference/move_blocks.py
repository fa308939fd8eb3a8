"""Move blocks between two caches: out to swap space and back, all blocks of a step at once (3.4.5)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def move_blocks(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs_N2: Tensor) -> None:
    """For each pair (block, block there), for each source and its destination: destination[there] = source[block].

    Sources and destinations share no memory, and no two pairs have the same destination, so the order does not count.
    They may lie on different devices. Then copies from and to pinned memory take effect in the order of the device's
    work, and the host does not wait; what is not pinned is waited for. Pairs belong into host memory.
    """
    for block, there in pairs_N2.tolist():
        for source, destination in zip(sources, destinations, strict=True):
            destination[there].copy_(source[block], non_blocking=True)
