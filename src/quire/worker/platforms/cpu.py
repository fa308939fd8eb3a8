"""A CPU: memory is the process's, threads are those of the operators."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from quire.config.processors import keep_near
from quire.worker.platforms.platform import MemoryReport, PeakMemory, dtype_by_name
from quire.worker.platforms.process_memory import peak_resident_bytes, process_memory, reset_peak, resident_bytes

_POLL_SECONDS = 0.002


class CpuPlatform:
    """The processor of this machine."""

    name = "cpu"
    supported_dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def dtype(self, name: str) -> torch.dtype:
        return dtype_by_name(name, self.supported_dtypes, "a CPU")

    def memory(self) -> MemoryReport:
        return process_memory()

    @contextmanager
    def measure_peak(self) -> Iterator[PeakMemory]:
        """From the kernel's high-water mark; where it cannot be reset, by looking every two milliseconds."""
        result = PeakMemory()
        start = resident_bytes()
        if reset_peak():
            yield result
            result.peak_bytes = max(0, peak_resident_bytes() - start)
            return
        highest = [start]
        is_done = threading.Event()

        def watch() -> None:
            while not is_done.wait(_POLL_SECONDS):
                highest[0] = max(highest[0], resident_bytes())

        watcher = threading.Thread(target=watch, name="quire-peak-memory", daemon=True)
        watcher.start()
        try:
            yield result
        finally:
            highest[0] = max(highest[0], resident_bytes())
            is_done.set()
            watcher.join()
        result.peak_bytes = highest[0] - start

    def set_threads(self, num_threads: int, processors: Sequence[int] | None = None) -> None:
        # Imported here: the package of the kernels is nothing that a look at the memory should load.
        from quire.worker.kernels import cpu

        if processors is not None:
            # before weights and cache are touched
            keep_near(processors)
        torch.set_num_threads(num_threads)
        cpu.set_crew(num_threads, processors)

    def synchronize(self) -> None:
        """Nothing runs behind our back."""

    def is_beyond_repair(self, error: BaseException) -> bool:
        return False

    def release_memory(self) -> None:
        """Nothing is kept in reserve."""
