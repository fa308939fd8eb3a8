"""A CPU: memory is the process's, threads are those of the operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.config.process_memory import MemoryReport, give_back_freed, process_memory
from quire.config.processors import keep_near
from quire.worker.live_tensors import LiveTensors
from quire.worker.platforms.platform import dtype_by_name


class CpuPlatform:
    """The processor of this machine."""

    name = "cpu"
    supported_dtypes = (torch.float32, torch.bfloat16, torch.float16)
    # recorded as one program it is faster (docs/benchmarks.md)
    gains_from_compiling = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def dtype(self, name: str) -> torch.dtype:
        return dtype_by_name(name, self.supported_dtypes, "a CPU")

    def memory(self) -> MemoryReport:
        # else what loading and a first step have freed would count as taken, and be counted again with the largest step
        give_back_freed()
        return process_memory()

    def measure_peak(self) -> LiveTensors:
        return LiveTensors()

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

    def graph_device(self) -> None:
        return None

    def copy_lane(self) -> None:
        return None

    def release_memory(self) -> None:
        give_back_freed()
