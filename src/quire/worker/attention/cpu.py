"""The CPU backend: C++ kernels that read the blocks in place (`csrc/cpu`), through the operators of `kernels`."""

from __future__ import annotations

from quire.worker import kernels
from quire.worker.attention.backend import AttentionSpec
from quire.worker.attention.paged import PagedAttention


class CpuBackend(PagedAttention):
    """Serves every layer of a model on a CPU, where the kernels can be built."""

    name = "cpu"
    kernels = kernels

    def supports(self, spec: AttentionSpec) -> str | None:
        # Imported here: loading may compile, which only a machine that uses the kernels should pay for.
        from quire.worker.kernels import cpu

        if spec.device_type != "cpu":
            return f"it computes on CPUs, not on {spec.device_type}"
        if not cpu.load():
            return "its C++ library could not be built or loaded (the log says why)"
        return super().supports(spec)
