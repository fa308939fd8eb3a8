"""Where swapped blocks are kept: three homes for one piece of memory on the host, and how much each of them can give.

    OrdinaryMemory   on a CPU; the system commits a page when it is first written
    PinnedMemory     beside a GPU, which reads and writes it while the host goes on
    FileMemory       a file in a folder that the user named; what memory has no room for, the system writes to disk

Called by Worker, which picks one, and by SwapArena.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.config.process_memory import process_memory
from quire.errors import CapacityError, OptionError
from quire.worker.lazy_memory import lazy_zeros

# The rest belongs to the weights' pages, to other programs, and on a CPU to the KV cache.
_SHARE_OF_FREE_MEMORY = 4
_ADVICE = "Lower swap_space, or set it to 0 to have preempted requests computed again."


class HostMemory(Protocol):
    """A home of swapped blocks."""

    def free_bytes(self) -> int:
        """What may be allocated here, limits of a container included."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Bytes, given back when the last tensor that shares them is gone. CapacityError if there are too few."""
        ...


class OrdinaryMemory:
    """Anonymous pages of this process."""

    def free_bytes(self) -> int:
        return process_memory().free_bytes // _SHARE_OF_FREE_MEMORY

    def allocate(self, num_bytes: int) -> Tensor:
        try:
            return torch.from_numpy(lazy_zeros((num_bytes,), np.uint8, use_huge_pages=True))
        except (OSError, MemoryError) as error:
            raise _refused(num_bytes, error) from error


class PinnedMemory:
    """Pages that stay where they are, so that a GPU copies from and to them by itself."""

    def free_bytes(self) -> int:
        return process_memory().free_bytes // _SHARE_OF_FREE_MEMORY

    def allocate(self, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, MemoryError) as error:
            raise _refused(num_bytes, error) from error


class FileMemory:
    """Pages of a file without a name: it is gone with the process, however that ends."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self._directory).free
        except OSError as error:
            raise self._unusable(error) from error

    def allocate(self, num_bytes: int) -> Tensor:
        free = self.free_bytes()
        if num_bytes > free:
            raise self._too_small(num_bytes, free)
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            with tempfile.TemporaryFile(dir=self._directory, prefix="quire-swap-") as file:
                # Reserved now: a disk that fills up later would end the process at a write to memory.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                memory = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._too_small(num_bytes, free) from error
            raise self._unusable(error) from error
        return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))

    def _too_small(self, num_bytes: int, free: int) -> CapacityError:
        return CapacityError(
            f"swap_directory={self._directory}: swap space needs {_size(num_bytes)} there, {_size(free)} is free. "
            f"{_ADVICE}"
        )

    def _unusable(self, error: OSError) -> OptionError:
        return OptionError(
            f"swap_directory={self._directory}: must be a folder that this program may write into, because the file "
            f"of swapped blocks is made there ({error.strerror}). Create it, or leave swap_directory out to swap to "
            "memory."
        )


def host_memory(device_type: str, swap_directory: str | None) -> HostMemory:
    """The home for a device of this type; a folder comes before memory."""
    if swap_directory is not None:
        return FileMemory(swap_directory)
    return OrdinaryMemory() if device_type == "cpu" else PinnedMemory()


def _refused(num_bytes: int, error: Exception) -> CapacityError:
    return CapacityError(f"swap space: {_size(num_bytes)} of host memory could not be allocated ({error}). {_ADVICE}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:.2f} MiB"
