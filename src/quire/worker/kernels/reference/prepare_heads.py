"""What happens between the projections of a layer and its attention: norms of heads, positions, the write into the
cache."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels.reference.rms_norm import rms_norm
from quire.worker.kernels.reference.rotary_embedding import rotary_embedding
from quire.worker.kernels.reference.write_kv import write_kv


def prepare_heads(
    positions_T: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKE: Tensor,
    query_weight_D: Tensor | None,
    key_weight_D: Tensor | None,
    eps: float,
    cos_sin_cache_PR: Tensor,
    is_interleaved: bool,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
) -> None:
    """In place on query and key, which are normalised where there are weights, and turned. Then keys and values are
    stored. On a GPU it is one kernel, because a step of few tokens takes as long as it has kernels."""
    for heads, weight_D in ((query_THD, query_weight_D), (key_TKD, key_weight_D)):
        if weight_D is not None:
            heads.copy_(rms_norm(heads, weight_D, eps))
    rotary_embedding(positions_T, query_THD, key_TKD, cos_sin_cache_PR, is_interleaved)
    write_kv(key_TKD, value_TKE, k_cache, v_cache, slots_T)
