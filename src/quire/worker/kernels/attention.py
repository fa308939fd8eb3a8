"""Attention over the paged KV cache. What it means is written in `reference/<name>.py`."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels import operators


def paged_attention(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_starts_S1: Tensor,
    out_THE: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    is_chunked: bool = False,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    ends_T: Tensor | None = None,
    slopes_H: Tensor | None = None,
    begins_S: Tensor | None = None,
    bias_HR: Tensor | None = None,
) -> None:
    """Causal attention of each sequence's newest tokens over its blocks, any mix of lengths; fills `out_THE`.

    `ends_T`: each token sees its sequence up to there, instead of up to itself. `begins_S`: the tokens of a sequence
    see it from there on. `slopes_H`: those of ALiBi. `bias_HR`: by head and distance, added to scores; the last is
    that of all greater distances.
    """
    operators.paged_attention(
        query_THD,
        k_cache,
        v_cache,
        block_tables_SM,
        seq_lens_S,
        query_starts_S1,
        out_THE,
        sinks_H,
        ends_T,
        scale,
        sliding_window,
        is_chunked,
        soft_cap,
        slopes_H,
        begins_S,
        bias_HR,
    )


def attention_part(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_SM: Tensor,
    seq_lens_S: Tensor,
    query_starts_S1: Tensor,
    *,
    scale: float,
    value_dim: int,
    rank: int,
    size: int,
    sliding_window: int = 0,
    is_chunked: bool = False,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    ends_T: Tensor | None = None,
    slopes_H: Tensor | None = None,
    begins_S: Tensor | None = None,
    bias_HR: Tensor | None = None,
) -> Tensor:
    """[T, H, value_dim + 1] in float32: the same over the keys of those positions that this one of `size` ranks keeps,
    and behind each row the logarithm of the sum of its weights. Sinks are given to one rank."""
    return operators.attention_part(
        query_THD,
        k_cache,
        v_cache,
        block_tables_SM,
        seq_lens_S,
        query_starts_S1,
        sinks_H,
        ends_T,
        scale,
        sliding_window,
        is_chunked,
        soft_cap,
        value_dim,
        rank,
        size,
        slopes_H,
        begins_S,
        bias_HR,
    )
