"""The interface between the engine and attention kernels (4.2.2, Attention Backend Interface).

A backend takes query, key and value with fixed shapes, fills an output with a fixed shape, and brings its own
metadata: whatever it wants to compute once per step and group rather than once per layer.

Shape suffixes: T tokens of the step, S sequences of the step, M blocks of the longest table, H query heads,
K key/value heads, D dimension of a key, E dimension of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.worker.attention.layer import Attention


# tokens of a block that lives no longer than the call of a layer that is not causal
STEP_BLOCK = 16


@dataclass(frozen=True)
class AttentionSpec:
    """Everything about a layer that may decide whether a backend can serve it."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype
    device_type: str
    # what keys and values are kept as (kernels/cache_format.py)
    cache_dtype: torch.dtype
    # tokens that a token sees at most; they are those of its chunk, counted from position 0, where it is chunked
    sliding_window: int = 0
    is_chunked: bool = False
    soft_cap: float = 0.0
    has_sinks: bool = False
    # ALiBi: a slope a head, times the position of each key, is added to scores
    has_slopes: bool = False
    # False: the tokens of a sequence see each other, and keys and values are those of the step alone
    is_causal: bool = True
    # a number by head and distance is added to scores
    has_bias: bool = False
    # keys and values are those of what an encoder made, and are given to `store`; other layers of such a model see a
    # sequence from `AttentionBatch.begins_S` on
    is_crossing: bool = False
    # a value is the beginning of its key and not kept again: `v_cache` is `k_cache`, and there is no value to store
    values_in_keys: bool = False


@dataclass(frozen=True)
class AttentionBatch:
    """What the model runner knows of a step, for one group.

    Sequence s owns the tokens query_starts[s] ... query_starts[s + 1] - 1 of the step; they are its newest tokens,
    so the last of them has the position seq_lens[s] - 1. No phases: one token or a thousand are the same to it.
    """

    query_starts_S1: Tensor
    seq_lens_S: Tensor
    block_tables_SM: Tensor
    # slot = block * block_size + offset of each token's own key and value; negative: keep nothing
    slots_T: Tensor
    max_query_len: int
    max_seq_len: int
    # each token sees its sequence up to there, which is more than itself; None: up to itself, as text does
    ends_T: Tensor | None = None
    # the tokens of each sequence see it from there on; None: from its first token on
    begins_S: Tensor | None = None
    # of layers that are not causal: so many blocks of STEP_BLOCK tokens hold the keys and values of the step
    num_step_blocks: int = 0


class PagedKernels(Protocol):
    """The operations of attention in blocks (`kernels/`), whatever computes them."""

    @property
    def write_kv(self) -> Callable[..., None]: ...

    @property
    def paged_attention(self) -> Callable[..., None]: ...

    @property
    def attention_part(self) -> Callable[..., Tensor]: ...

    @property
    def merge_attention(self) -> Callable[..., None]: ...


class AttentionBackend(Protocol):
    """One way of computing attention over a paged KV cache.

    A class may also have `cache_dtypes`, the types in which it can keep keys and values beside the model's own,
    `takes_not_causal`, which is true if it takes keys and values from `Attention.caches`, and
    `store(layer, key_TKD, value_TKE, metadata)`, which stores without attending (cross attention); without them, it is
    never asked to.
    """

    name: str

    def supports(self, spec: AttentionSpec) -> str | None:
        """None, or the reason why this backend cannot serve such a layer."""
        ...

    def build_metadata(self, batch: AttentionBatch) -> Any:
        """Called once per step and group; the result reaches `forward` unchanged."""
        ...

    def forward(
        self,
        layer: Attention,
        query_THD: Tensor,
        key_TKD: Tensor | None,
        value_TKE: Tensor | None,
        metadata: Any,
        out_THE: Tensor,
    ) -> None:
        """Store keys and values in `layer`'s cache, then fill `out_THE`.

        No values: they are parts of keys. No keys either: those of these tokens are stored already.
        """
        ...
