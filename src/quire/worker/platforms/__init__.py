"""Devices that a worker computes on, one small object each."""

from collections.abc import Callable

from quire.config.process_memory import MemoryReport
from quire.errors import OptionError
from quire.worker.platforms.platform import PeakMemory, Platform

__all__ = ["PLATFORMS", "MemoryReport", "PeakMemory", "Platform", "current_platform"]


def _cpu() -> Platform:
    from quire.worker.platforms.cpu import CpuPlatform

    return CpuPlatform()


def _cuda() -> Platform:
    """What torch calls `cuda`: a build of it for AMD's GPUs has that name for these."""
    import torch

    if torch.version.hip is not None:
        from quire.worker.platforms.rocm import RocmPlatform

        return RocmPlatform()
    from quire.worker.platforms.cuda import CudaPlatform

    return CudaPlatform()


def _mps() -> Platform:
    from quire.worker.platforms.mps import refuse

    raise refuse()


# How each is made. Imported when asked for: a platform may load the libraries of its device.
PLATFORMS: dict[str, Callable[[], Platform]] = {"cpu": _cpu, "cuda": _cuda, "mps": _mps}


def current_platform(device: str) -> Platform:
    """The platform of a device's name."""
    make = PLATFORMS.get(device)
    if make is None:
        raise OptionError(f"device={device!r}: must be one of {', '.join(PLATFORMS)}.")
    return make()
