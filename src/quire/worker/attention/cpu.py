"""The CPU backend: C++ kernels that read the blocks in place (`csrc/cpu`), through the operators of `kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from quire.worker import kernels
from quire.worker.attention.backend import AttentionBatch, AttentionSpec

if TYPE_CHECKING:
    from quire.worker.attention.layer import Attention


class CpuBackend:
    """Needs nothing beyond the batch itself, so the batch is its metadata."""

    name = "cpu"

    def supports(self, spec: AttentionSpec) -> str | None:
        # Imported here: loading may compile, which only a machine that uses the kernels should pay for.
        from quire.worker.kernels import cpu

        if spec.device_type != "cpu":
            return f"it computes on CPUs, not on {spec.device_type}"
        if not cpu.load():
            return "its C++ library could not be built or loaded (the log says why)"
        return None

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(
        self,
        layer: Attention,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKE: Tensor,
        metadata: AttentionBatch,
        out_THE: Tensor,
    ) -> None:
        assert layer.k_cache is not None
        assert layer.v_cache is not None
        kernels.write_kv(key_TKD, value_TKE, layer.k_cache, layer.v_cache, metadata.slots_T)
        kernels.paged_attention(
            query_THD,
            layer.k_cache,
            layer.v_cache,
            metadata.block_tables_SM,
            metadata.seq_lens_S,
            metadata.query_starts_S1,
            out_THE,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            soft_cap=layer.soft_cap,
            sinks_H=layer.sinks,
        )
