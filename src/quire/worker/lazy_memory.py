"""Large zeroed arrays whose pages the system commits only where they are touched.

Used for tables that must be wide enough for the longest sequence in every row, and for the KV cache on a CPU.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

# Linux: no commit charge for pages that nobody touches, so that a wide table cannot be refused. Python 3.13 names it.
_NO_RESERVE = 0x4000
_HUGE_PAGE = 2 << 20


def lazy_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike, *, use_huge_pages: bool = False) -> npt.NDArray[Any]:
    """Zeros; page-aligned. Huge pages only where the memory will be used in full: they commit 2 MiB at a touch."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.zeros(shape, dtype=kind)
    num_bytes = count * kind.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    if use_huge_pages and num_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=kind, count=count).reshape(shape)
