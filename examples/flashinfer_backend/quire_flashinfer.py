"""An attention backend from outside of Quire: FlashInfer computes over the blocks where they lie.

FlashInfer wants to plan a step before it runs, once for all layers that are alike. So the metadata of a step keeps its
plans, and the first layer of each kind makes one. Keys and values are stored by Quire's own kernel.

A plan waits for the device, and no graph of a step is captured: this is an example of the interface. It has not run on
a GPU; a test runs it with a stand-in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.worker import kernels
from quire.worker.attention import Attention, AttentionBatch, AttentionSpec

_WORKSPACE_BYTES = 128 << 20


class FlashInferBackend:
    """Serves layers of half precision that see what is before them, within a window or not."""

    name = "flashinfer"

    def supports(self, spec: AttentionSpec) -> str | None:
        refusals = {
            f"it computes on GPUs, not on {spec.device_type}": spec.device_type != "cuda",
            f"it computes in bfloat16 and float16, not in {spec.dtype}": spec.dtype.itemsize != 2,
            "it knows no sinks": spec.has_sinks,
            "it knows no slopes (ALiBi)": spec.has_slopes,
            "it knows no bias of relative positions": spec.has_bias,
            "it knows no windows that do not slide": spec.is_chunked,
            "its values are not kept in keys": spec.values_in_keys,
            "its tokens see what is before them alone": not spec.is_causal,
        }
        return next((reason for reason, is_so in refusals.items() if is_so), None)

    def build_metadata(self, batch: AttentionBatch) -> Step:
        return Step(batch)

    def forward(
        self,
        layer: Attention,
        query_THD: Tensor,
        key_TKD: Tensor | None,
        value_TKE: Tensor | None,
        metadata: Step,
        out_THE: Tensor,
    ) -> None:
        if layer.ranks.size > 1 or metadata.batch.ends_T is not None:
            raise RuntimeError("flashinfer: keys that workers share, and tokens that see ahead, need another backend")
        caches = layer.caches(metadata.batch)
        if key_TKD is not None:
            kernels.write_kv(key_TKD, value_TKE, *caches, metadata.batch.slots_T)
        wrapper, num_rows = metadata.planned(layer, query_THD.dtype)
        wrapper.run(query_THD[:num_rows], caches, out=out_THE[:num_rows])


class Step:
    """The plans of a step, for the layers of a group."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self._plans: dict[tuple[Any, ...], tuple[Any, int]] = {}

    def planned(self, layer: Attention, dtype: torch.dtype) -> tuple[Any, int]:
        """A wrapper that was told of the step, and how many rows of it belong to sequences."""
        kind = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, layer.sliding_window, layer.soft_cap
        if kind not in self._plans:
            self._plans[kind] = self._plan(layer, dtype)
        return self._plans[kind]

    def _plan(self, layer: Attention, dtype: torch.dtype) -> tuple[Any, int]:
        import flashinfer

        batch = self.batch
        device = batch.slots_T.device
        assert layer.k_cache is not None
        block_size = layer.k_cache.shape[2]
        num_blocks_S = (batch.seq_lens_S + block_size - 1) // block_size
        columns_M = torch.arange(batch.block_tables_SM.shape[1], device=device)
        first_block_S1 = torch.nn.functional.pad(num_blocks_S.cumsum(0), (1, 0)).int()
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device), kv_layout="HND"
        )
        wrapper.plan(
            batch.query_starts_S1.int(),
            first_block_S1,
            batch.block_tables_SM[columns_M < num_blocks_S[:, None]],
            ((batch.seq_lens_S - 1) % block_size + 1).int(),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            block_size,
            head_dim_vo=layer.value_dim,
            causal=True,
            sm_scale=layer.scale,
            # tokens before a token that it sees; -1: all
            window_left=layer.sliding_window - 1,
            logits_soft_cap=layer.soft_cap or None,
            q_data_type=dtype,
            kv_data_type=layer.k_cache.dtype,
        )
        return wrapper, int(batch.query_starts_S1[-1])
