"""The GPU backend: Triton kernels that read the blocks in place (`kernels/triton`), through the operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from quire.worker import kernels
from quire.worker.attention.backend import AttentionBatch, AttentionSpec
from quire.worker.attention.heads import Heads
from quire.worker.attention.paged import PagedAttention

if TYPE_CHECKING:
    from quire.worker.attention.layer import Attention


class TritonBackend(PagedAttention):
    """Serves every layer of a model on a GPU that Triton compiles for, and on a CPU in its interpreter."""

    name = "triton"
    kernels = kernels

    def supports(self, spec: AttentionSpec) -> str | None:
        # Imported here: only a machine that uses the kernels should load Triton.
        from quire.worker.kernels import triton

        if spec.device_type not in ("cuda", "cpu"):
            return f"it computes on GPUs, not on {spec.device_type}"
        if not triton.load("CUDA" if spec.device_type == "cuda" else "CPU"):
            if spec.device_type == "cpu":
                return "it computes on GPUs (on a CPU Triton interprets it if QUIRE_CPU_KERNELS=triton)"
            return f"its kernels are not loaded: {triton.statistics()['reason']}"
        return super().supports(spec)

    def prepare_heads(
        self,
        layer: Attention,
        heads: Heads,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKE: Tensor,
        metadata: AttentionBatch,
    ) -> None:
        """What `forward` would find done and stored: it then gets queries alone."""
        query_norm = heads.query_norm
        key_norm = heads.key_norm
        norm = query_norm or key_norm
        rotary = heads.rotary
        k_cache, v_cache = layer.caches(metadata)
        kernels.prepare_heads(
            heads.positions,
            query_THD,
            key_TKD,
            value_TKE,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            0.0 if norm is None else norm.eps,
            rotary.cos_sin_cache,
            rotary.is_interleaved,
            k_cache,
            v_cache,
            metadata.slots_T,
        )
