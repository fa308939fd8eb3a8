"""Devices that a worker computes on, one small object each."""

from quire.errors import OptionError
from quire.worker.platforms.platform import MemoryReport, PeakMemory, Platform

__all__ = ["MemoryReport", "PeakMemory", "Platform", "current_platform"]


def current_platform(device: str) -> Platform:
    """The platform of a device's name, `cpu` or `cuda`."""
    if device == "cpu":
        from quire.worker.platforms.cpu import CpuPlatform

        return CpuPlatform()
    if device == "cuda":
        from quire.worker.platforms.cuda import CudaPlatform

        return CudaPlatform()
    raise OptionError(f"device={device!r}: must be cpu or cuda.")
