"""Positions as a learned bias of attention (T5): a number of each head for every bucket of distances.

Near distances have a bucket each; further on buckets grow, and beyond the greatest distance all share the last one. So
the bias of a head is a short list by distance, which is made of its buckets when weights are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# of a bias that is kept at a time: 64 MiB in float32
_MOST_NUMBERS = 1 << 24


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


class BiasOfAll:
    """[heads, queries, keys] of a text whose tokens see each other, some queries at a time: the whole grows with the
    square of the text, and one of a few thousand tokens would need gigabytes."""

    def __init__(self, bias_HR: Tensor, num_tokens: int) -> None:
        most = bias_HR.shape[1] // 2
        # What a query adds for its keys is a window of this line: one further to the right for each query before it.
        back_L = torch.arange(num_tokens - 1, -num_tokens, -1, device=bias_HR.device).clamp(-most, most)
        self._windows_HTT = bias_HR[:, back_L + most].unfold(1, num_tokens, 1)
        self._num_tokens = num_tokens
        self._step = max(1, _MOST_NUMBERS // (len(bias_HR) * num_tokens))
        # of a short text, for all layers
        self._whole = self._rows(0, num_tokens) if self._step >= num_tokens else None

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Queries, and what they add: [heads, queries, keys]."""
        if self._whole is not None:
            yield slice(0, self._num_tokens), self._whole
            return
        for first in range(0, self._num_tokens, self._step):
            last = min(first + self._step, self._num_tokens)
            yield slice(first, last), self._rows(first, last)

    def _rows(self, first: int, last: int) -> Tensor:
        return self._windows_HTT[:, self._num_tokens - last : self._num_tokens - first].flip(1)
