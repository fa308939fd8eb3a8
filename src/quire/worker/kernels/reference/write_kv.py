"""Store the keys and values of a step in the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels.cache_format import codes_of, encoded, has_scales, scales_of


def write_kv(
    key_TKD: Tensor,
    value_TKE: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    rank: int = 0,
    size: int = 1,
) -> None:
    """cache[slot // block_size, :, slot % block_size] = key for every token whose slot is not negative.

    Without values only keys are stored: values are the beginnings of keys then. Of `size` ranks that share the slots of
    a block, this one keeps slots rank, rank + size, ... one after the other.

    Caches may be of another type than keys and values (`cache_format.py`): these are rounded, or encoded.

    Selecting tokens with a mask would make the host wait for a device. So a token without a slot repeats the write of
    the first one that has a slot, and if there is none, it writes what is there already.
    """
    if slots_T.numel() == 0:
        return
    has_slot_T = (slots_T >= 0) & (slots_T % size == rank)
    own_T = torch.arange(slots_T.shape[0], device=slots_T.device)
    source_T = torch.where(has_slot_T, own_T, has_slot_T.int().argmax())
    slot_T = slots_T[source_T].clamp(min=0) // size
    is_write_T11 = has_slot_T[source_T][:, None, None]
    for new, cache in ((key_TKD, k_cache), (value_TKE, v_cache)):
        if new is None:
            continue
        block_size = cache.shape[2]
        block_T, place_T = slot_T // block_size, slot_T % block_size
        parts = [(new.to(cache.dtype), cache)]
        if has_scales(cache.dtype):
            codes, scales = encoded(new, cache.dtype)
            parts = [(codes, codes_of(cache)), (scales[..., None], scales_of(cache)[..., None])]
        for rows, part in parts:
            part[block_T, :, place_T] = torch.where(is_write_T11, rows[source_T], part[block_T, :, place_T])
