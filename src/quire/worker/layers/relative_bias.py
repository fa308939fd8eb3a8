"""Positions as a learned bias of attention (T5): a number of each head for every bucket of distances.

Near distances have a bucket each; further on buckets grow, and beyond the greatest distance all share the last one. So
the bias of a head is a short list by distance, which is made of its buckets when weights are loaded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bias_by_distance(buckets_BH: Tensor, max_distance: int, *, is_causal: bool) -> Tensor:
    """[heads, distances]: of keys that lie 0, 1 ... max_distance tokens back; or, where tokens see ahead as well, of
    keys from max_distance tokens ahead to as many back."""
    first = 0 if is_causal else -max_distance
    back_R = torch.arange(first, max_distance + 1, device=buckets_BH.device)
    bucket_R = _buckets(back_R, buckets_BH.shape[0], max_distance, is_causal=is_causal)
    return buckets_BH[bucket_R].transpose(0, 1)


def _buckets(back_R: Tensor, num_buckets: int, max_distance: int, *, is_causal: bool) -> Tensor:
    """Half of the buckets are of keys ahead, where there are such."""
    num_own = num_buckets if is_causal else num_buckets // 2
    distance_R = back_R.abs()
    num_exact = num_own // 2
    growth = torch.log(distance_R.float() / num_exact) / math.log(max_distance / num_exact)
    grown_R = num_exact + (growth * (num_own - num_exact)).clamp(min=0).to(torch.long)
    bucket_R = torch.where(distance_R < num_exact, distance_R, grown_R.clamp(max=num_own - 1))
    return bucket_R + num_own * (back_R < 0)


def bias_of_all(bias_HR: Tensor, num_tokens: int) -> Tensor:
    """[heads, queries, keys] of a text whose tokens see each other."""
    most = bias_HR.shape[1] // 2
    place_T = torch.arange(num_tokens, device=bias_HR.device)
    back_TT = (place_T[:, None] - place_T).clamp(-most, most)
    return bias_HR[:, back_TT + most]
