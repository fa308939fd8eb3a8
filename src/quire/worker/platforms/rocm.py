"""An AMD GPU: torch's build for ROCm has it under the name `cuda`, and Triton compiles for it.

The kernels are compiled ahead of time for gfx942 in tests, and take the shapes of waves of 64 threads; the three
architectures here have them. Others are refused rather than tried.
"""

from __future__ import annotations

import os

import torch

from quire.errors import OptionError
from quire.worker.platforms.cuda import CudaPlatform

# MI200, MI300 and MI350
SERVED = ("gfx90a", "gfx942", "gfx950")


class RocmPlatform(CudaPlatform):
    """As an NVIDIA GPU, through the same functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        architecture = torch.cuda.get_device_properties(self.device).gcnArchName.partition(":")[0]
        if architecture not in SERVED and os.environ.get("QUIRE_GPU_KERNELS") != "reference":
            raise OptionError(
                f"device=cuda: this GPU is a {architecture}, and Quire's kernels are built for {', '.join(SERVED)}. "
                "Use device=cpu, or set QUIRE_GPU_KERNELS=reference to run plain PyTorch on it, which is many times "
                "slower."
            )

    def is_beyond_repair(self, error: BaseException) -> bool:
        return super().is_beyond_repair(error) or "HIP error" in str(error)
