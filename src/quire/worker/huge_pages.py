"""Bytes that were mapped from a file move into huge pages of the process's own, while they are read.

The system keeps a file in pages whose sizes it chooses. Where they are small, weights are read more slowly
(docs/benchmarks.md). So a thread that nobody waits for copies a piece at a time into huge pages, and puts these
where the file's pages were: one call of the system, so that a reader finds the same bytes at every moment, at the same
address.

Owns the thread. Nobody may write the bytes before `stop` has returned: a piece that is just being copied would lose it.
Called by Worker, for packed weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.config.process_memory import process_memory

_logger = logging.getLogger(__name__)
_HUGE_PAGE = 2 << 20
_SMALLEST_PIECE = 4 * _HUGE_PAGE
_MOST_PIECES = 256
# A start is over by then; its first answer shares its processors with nobody.
_SECONDS_BEFORE = 3.0
# between two pieces, of which each takes some milliseconds
_SECONDS_BETWEEN = 0.01
_NICENESS = 10
# What other programs and the cache of the system keep, whatever happens. The pages of a file are shared, and those here
# are not: replicas that move the same file at once would together take several times what each of them has seen free.
_LEFT_FREE = 2 << 30
# Linux 6.1: makes one huge page of what lies there, and says whether it is one.
_MADV_COLLAPSE = 25
# MREMAP_MAYMOVE | MREMAP_FIXED: a mapping goes with its pages to a place that is given, and replaces what is there.
_MOVE = 1 | 2
# Linux: no commit charge, which a mapping would take with it.
_NO_RESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
# Linux 5.14: maps what is in the cache of the system, so that it says in which pages that lies.
_MADV_POPULATE_READ = 22
# Of a file that lies so already, moving the rest would cost more than it gives.
_ENOUGH_IN_HUGE_PAGES = 0.9
_MAPPINGS = Path("/proc/self/smaps")
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER_OVERCOMMITS = "2"


class HugePages:
    """One array on its way into huge pages. What cannot be moved stays where it is."""

    def __init__(self, array: npt.NDArray[np.uint8], *, seconds_before: float = _SECONDS_BEFORE) -> None:
        self._array = array
        self._seconds_before = seconds_before
        self._stopped = threading.Event()
        # none before the start: it would hold this and the array until the collector comes
        self._thread: threading.Thread | None = None
        self.num_moved_bytes = 0

    def start(self) -> None:
        if self._array.nbytes >= 2 * _HUGE_PAGE and _are_allowed():
            self._thread = threading.Thread(target=self._move, name="quire-huge-pages", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Afterwards the bytes may be written, or be gone."""
        self._stopped.set()
        self.wait()

    def wait(self) -> None:
        """Until all has been moved that can be."""
        if self._thread is not None:
            self._thread.join()

    def _move(self) -> None:
        # a rank with a core of its own would share it half and half, and all others would wait for it
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        if self._stopped.wait(self._seconds_before):
            return
        began_at = time.monotonic()
        pieces = list(_pieces(self._array))
        num_left = sum(size for _, size in pieces)
        if not _has_room_for(num_left):
            # read now, it would only push other pages out
            return
        system = _System()
        for address, size in pieces:
            # without it, what nobody has touched yet counts as if it lay in small pages
            system.advise(address, size, _MADV_POPULATE_READ)
            if self._stopped.wait(0):
                return
        if _bytes_in_huge_pages(self._array.ctypes.data) >= _ENOUGH_IN_HUGE_PAGES * self._array.nbytes:
            _logger.info("the system keeps the file of weights in huge pages")
            return
        for address, size in pieces:
            if not _has_room_for(num_left):
                break
            if not system.move_to_huge_pages(address, size):
                _logger.info("weights stay in the pages of their file: the system has no huge pages for them")
                break
            self.num_moved_bytes += size
            num_left -= size
            if self._stopped.wait(_SECONDS_BETWEEN):
                return
        seconds = time.monotonic() - began_at
        _logger.info("%d MiB of weights lie in huge pages, after %.1f s", self.num_moved_bytes >> 20, seconds)


def read_in_huge_pages(array: npt.NDArray[np.uint8]) -> None:
    """Whatever the system has yet to read of a file that is mapped here, it may read in huge pages.

    Models do not touch their weights in the order of the file, and would get small ones."""
    address = _aligned(array.ctypes.data)
    size = array.ctypes.data + array.nbytes - address
    if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        _System().advise(address, size, mmap.MADV_HUGEPAGE)


def _has_room_for(num_bytes: int) -> bool:
    has_room = process_memory().free_bytes >= num_bytes + _LEFT_FREE
    if not has_room:
        _logger.info("weights stay in the pages of their file: there is too little memory beside it")
    return has_room


def _are_allowed() -> bool:
    """Linux, where its administrator has not switched them off. Not where memory is never overcommitted: there a move
    is charged for when the file's pages have already gone, and may fail."""
    try:
        setting = _SETTING.read_text(encoding="ascii")
        overcommit = _OVERCOMMIT.read_text(encoding="ascii")
    except OSError:
        # another system, or a service from which it hides what its administrator may set
        return False
    return "[never]" not in setting and overcommit.strip() != _NEVER_OVERCOMMITS


def _bytes_in_huge_pages(address: int) -> int:
    """Of the mapping of a file at this address. The system puts what it reads or writes in long runs into such pages
    where it finds some, and in small ones otherwise."""
    is_here = False
    with contextlib.suppress(OSError), _MAPPINGS.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, *rest = line.split()
            if not name.endswith(":"):
                begin, end = (int(number, 16) for number in name.split("-"))
                is_here = begin <= address < end
            elif is_here and name == "FilePmdMapped:":
                return int(rest[0]) << 10
    return 0


def _pieces(array: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """Addresses and lengths, both multiples of a huge page. The system remembers each piece, so they are not many."""
    begin = _aligned(array.ctypes.data)
    end = (array.ctypes.data + array.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    length = max(_SMALLEST_PIECE, _aligned(array.nbytes // _MOST_PIECES))
    for address in range(begin, end, length):
        yield address, min(length, end - address)


def _aligned(number: int) -> int:
    return -(-number // _HUGE_PAGE) * _HUGE_PAGE


class _System:
    """Calls of the C library, for one piece after the other."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._mmap, self._munmap, self._madvise, self._mremap = (
            getattr(library, name) for name in ("mmap", "munmap", "madvise", "mremap")
        )
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
        self._munmap.argtypes = (pointer, size)
        self._madvise.argtypes = (pointer, size, number)
        self._mremap.argtypes = (pointer, size, size, number, pointer)
        self._mmap.restype = self._mremap.restype = pointer

    def advise(self, address: int, size: int, advice: int) -> None:
        """A system that does not know the advice goes on without."""
        self._madvise(address, size, advice)

    def move_to_huge_pages(self, address: int, size: int) -> bool:
        """Whether these bytes lie in huge pages now. If not, they lie where they lay.

        The new pages come in a mapping of their own, which moves whole. With one that stays behind, or grows, Linux
        would look for room when the old pages are gone already, and a reader would meet a hole. All that it still looks
        for here, a free entry in its table of mappings, it looks for before.
        """
        copy = self._take(size)
        if copy is None:
            return False
        ctypes.memmove(copy, address, size)
        if self._madvise(copy, size, _MADV_COLLAPSE) == 0 and self._mremap(copy, size, size, _MOVE, address) == address:
            return True
        self._munmap(copy, size)
        return False

    def _take(self, size: int) -> int | None:
        """Memory that begins where a huge page can; None: there is none."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        begin = self._mmap(None, size + _HUGE_PAGE, protection, kind, -1, 0)
        if begin == _FAILED:
            return None
        address = _aligned(begin)
        end = begin + size + _HUGE_PAGE
        if address > begin:
            self._munmap(begin, address - begin)
        self._munmap(address + size, end - address - size)
        self._madvise(address, size, mmap.MADV_HUGEPAGE)
        return address
