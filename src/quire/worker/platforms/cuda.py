"""An NVIDIA GPU, through torch.cuda."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from quire.config.process_memory import MemoryReport
from quire.errors import OptionError
from quire.worker.arrival import CudaMark, Mark
from quire.worker.compilation.cuda_graphs import CudaGraphs
from quire.worker.platforms.platform import PeakMemory, dtype_by_name


class CudaCopyLane:
    """A stream of torch's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> CudaMark:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            return CudaMark()

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        torch.cuda.current_stream(self._device).wait_event(mark.event)


class CudaPlatform:
    """The GPU that is current in this process."""

    name = "cuda"
    gains_from_compiling = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            reason = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no usable GPU"
            raise OptionError(f"device=cuda: {reason}. Use device=cpu, or install a torch with CUDA and a driver.")
        self.device = torch.device("cuda", torch.cuda.current_device())
        # torch rounds what convolutions of float32 multiply to 10 bits where nobody says no; products it does not
        torch.backends.cudnn.allow_tf32 = False
        # Before Ampere there is no arithmetic in bfloat16.
        has_bfloat16 = torch.cuda.get_device_capability(self.device)[0] >= 8
        self.supported_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16)
        if has_bfloat16:
            self.supported_dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def dtype(self, name: str) -> torch.dtype:
        return dtype_by_name(name, self.supported_dtypes, torch.cuda.get_device_name(self.device))

    def memory(self) -> MemoryReport:
        # What torch keeps in reserve for itself is free to this process.
        free, total = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryReport(total, free + kept, "the GPU's memory")

    @contextmanager
    def measure_peak(self) -> Iterator[PeakMemory]:
        result = PeakMemory()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        start = torch.cuda.memory_allocated(self.device)
        yield result
        torch.cuda.synchronize(self.device)
        result.peak_bytes = torch.cuda.max_memory_allocated(self.device) - start

    def set_threads(self, num_threads: int, processors: Sequence[int] | None = None) -> None:
        torch.set_num_threads(num_threads)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def is_beyond_repair(self, error: BaseException) -> bool:
        """After a device-side assert or a fault of the device every later call of this process fails as well."""
        return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)

    def graph_device(self) -> CudaGraphs:
        return CudaGraphs(self.device)

    def copy_lane(self) -> CudaCopyLane:
        return CudaCopyLane(self.device)

    def release_memory(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
