"""The reference backend: plain PyTorch on any device, written to be right. Other backends are tested against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from quire.worker.attention.backend import AttentionBatch, AttentionSpec
from quire.worker.kernels import reference

if TYPE_CHECKING:
    from quire.worker.attention.layer import Attention


class ReferenceBackend:
    """Needs nothing beyond the batch itself, so the batch is its metadata."""

    name = "reference"

    def supports(self, spec: AttentionSpec) -> str | None:
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
        reference.write_kv(key_TKD, value_TKE, layer.k_cache, layer.v_cache, metadata.slots_T)
        reference.paged_attention(
            query_THD,
            layer.k_cache,
            layer.v_cache,
            metadata.block_tables_SM,
            metadata.seq_lens_S,
            metadata.query_starts_S1,
            out_THE,
            layer.sinks,
            layer.scale,
            layer.sliding_window,
            layer.soft_cap,
        )
