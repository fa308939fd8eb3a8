"""Large zeroed arrays whose pages the system commits only where they are touched.

Used for tables that must be wide enough for the longest sequence in every row, and for the KV cache on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Linux: no commit charge for pages that nobody touches, so that a wide table cannot be refused. Python 3.13 names it.
_NO_RESERVE = 0x4000
_HUGE_PAGE = 2 << 20
# Linux 5.14: commits pages as if each had been written to.
_MADV_POPULATE_WRITE = 23
# A tenth of a core beside a thread that computes; with less that one might wait for locks which this holds.
_NICENESS = 10


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


def give_back(array: npt.NDArray[np.uint8]) -> None:
    """The whole pages of a part of such an array go back to the system; they read as zeros from now on."""
    begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = _of_system("madvise")
    if end > begin and madvise is not None:
        madvise(begin, end - begin, mmap.MADV_DONTNEED)


def resident_bytes(array: npt.NDArray[np.uint8]) -> int:
    """Of such an array, what is in memory; 0 where the system does not say."""
    is_resident = np.zeros(-(-array.nbytes // mmap.PAGESIZE), dtype=np.uint8)
    mincore = _of_system("mincore")
    if mincore is None or not array.nbytes or mincore(array.ctypes.data, array.nbytes, is_resident.ctypes.data) != 0:
        return 0
    return int(np.count_nonzero(is_resident & 1)) * mmap.PAGESIZE


def commit_ahead(arrays: Sequence[npt.NDArray[np.uint8]]) -> None:
    """Commit arrays, which are beginnings of larger ones, in a thread that nobody waits for.

    A page that is touched first in the middle of a step holds the step up: a virtual machine may have to ask its host
    for the memory, which was seen to take 3 seconds for a GiB. Where the system cannot do this, pages come when they
    are touched.
    """
    madvise = _of_system("madvise")
    if arrays and madvise is not None:
        threading.Thread(target=_commit, args=(madvise, arrays), name="quire-commit", daemon=True).start()


def _commit(madvise: Any, arrays: Sequence[npt.NDArray[np.uint8]]) -> None:
    # Steps have begun. A rank with a core of its own would share it half and half, and all others would wait for it.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    # A huge page of each at a time: the first tokens of a sequence need the beginning of every array.
    for offset in range(0, max(array.nbytes for array in arrays), _HUGE_PAGE):
        for array in arrays:
            size = min(_HUGE_PAGE, array.nbytes - offset)
            if size > 0 and madvise(array.ctypes.data + offset, size, _MADV_POPULATE_WRITE) != 0:
                return


def _of_system(name: str) -> Any:
    """A call about a range of memory (address, bytes, and a number or an address); None: there is none here."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        last = ctypes.c_int if name == "madvise" else ctypes.c_void_p
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, last)
    return function
