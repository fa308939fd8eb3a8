"""Attention in blocks by two kernels, whatever computes them: what the cpu and the reference backend have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from quire.worker.attention.backend import AttentionBatch, AttentionSpec, PagedKernels
from quire.worker.kernels.cache_format import DTYPE_BY_NAME, SCALE_BYTES, has_scales

if TYPE_CHECKING:
    from quire.worker.attention.layer import Attention


class PagedAttention:
    """Needs nothing beyond the batch itself, so the batch is its metadata."""

    kernels: PagedKernels
    cache_dtypes = tuple(DTYPE_BY_NAME.values())
    takes_not_causal = True

    def supports(self, spec: AttentionSpec) -> str | None:
        if has_scales(spec.cache_dtype) and (spec.key_dim % SCALE_BYTES or spec.value_dim % SCALE_BYTES):
            return (
                f"keys and values as codes need head dimensions that are multiples of {SCALE_BYTES}, "
                f"not {spec.key_dim} and {spec.value_dim}"
            )
        return None

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def store(self, layer: Attention, key_TKD: Tensor, value_TKE: Tensor, metadata: AttentionBatch) -> None:
        self.kernels.write_kv(key_TKD, value_TKE, *layer.caches(metadata), metadata.slots_T)

    def forward(
        self,
        layer: Attention,
        query_THD: Tensor,
        key_TKD: Tensor | None,
        value_TKE: Tensor | None,
        metadata: AttentionBatch,
        out_THE: Tensor,
    ) -> None:
        ranks = layer.ranks
        caches = layer.caches(metadata)
        if key_TKD is not None:
            self.kernels.write_kv(key_TKD, value_TKE, *caches, metadata.slots_T, ranks.rank, ranks.size)
        inputs = (
            query_THD,
            *caches,
            metadata.block_tables_SM,
            metadata.seq_lens_S,
            metadata.query_starts_S1,
        )
        options: dict[str, Any] = {
            "scale": layer.scale,
            "sliding_window": layer.sliding_window,
            "is_chunked": layer.is_chunked,
            "soft_cap": layer.soft_cap,
            # what ranks add up gets them from one of them
            "sinks_H": layer.sinks if ranks.rank == 0 else None,
            "ends_T": metadata.ends_T,
            "begins_S": metadata.begins_S,
            "slopes_H": layer.slopes,
            "bias_HR": layer.bias,
        }
        if ranks.size == 1:
            self.kernels.paged_attention(*inputs, out_THE, **options)
            return
        part_THE = self.kernels.attention_part(
            *inputs, **options, value_dim=layer.value_dim, rank=ranks.rank, size=ranks.size
        )
        parts = ranks.gather(part_THE.view(len(part_THE), -1))
        self.kernels.merge_attention(parts.view(len(parts), ranks.size, *part_THE.shape[1:]), out_THE)
