"""The grid of attention cases, and how exact an answer must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Allowed difference relative to the largest magnitudes at hand. float32: sums in another order. The others: one unit
# in the last place of the result, because both sides compute in float32 and round once.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.0 / 128, torch.float16: 1.0 / 1024}
# What a cache of eight bits is multiplied with may be rounded to bfloat16 on the way.
CACHE_TOLERANCE = {**TOLERANCE, torch.int8: 1.0 / 128, torch.float8_e4m3fn: 1.0 / 128}


@dataclass(frozen=True)
class AttentionCase:
    """One call. `sequences` are pairs (number of query rows, length of the sequence)."""

    sequences: tuple[tuple[int, int], ...] = ((1, 37), (5, 5), (0, 9), (20, 70), (1, 1))
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 0  # 0: as the keys
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: as the query
    sliding_window: int = 0
    is_chunked: bool = False
    soft_cap: float = 0.0
    has_sinks: bool = False
    has_slopes: bool = False
    # a value is the beginning of its key, and kept once
    values_in_keys: bool = False
    # tokens that the first sequence begins with and that none of its rows sees; each further one has one more
    begin: int = 0
    # that a bias of scores tells apart; 0: there is none
    num_distances: int = 0
    # positions [first, end) of every sequence that see each other, as far as they are there
    together: tuple[int, int] | None = None

    def __str__(self) -> str:
        parts = [f"{n}of{length}" for n, length in self.sequences[:3]]
        parts += [f"h{self.num_heads}/{self.num_kv_heads}", f"d{self.head_dim}", f"b{self.block_size}"]
        parts += [f"e{self.value_dim}"] * bool(self.value_dim) + [f"w{self.sliding_window}"] * bool(self.sliding_window)
        parts += (
            [f"cap{self.soft_cap:g}"] * bool(self.soft_cap) + ["sinks"] * self.has_sinks + ["slopes"] * self.has_slopes
        )
        parts += ["latent"] * self.values_in_keys + ["chunks"] * self.is_chunked
        parts += [f"from{self.begin}"] * bool(self.begin) + [f"bias{self.num_distances}"] * bool(self.num_distances)
        parts += [f"together{self.together[0]}to{self.together[1]}"] if self.together else []
        parts += [str(self.cache_dtype).removeprefix("torch.")] * bool(self.cache_dtype)
        return "-".join([*parts, str(self.dtype).removeprefix("torch.")])

    @property
    def ends(self) -> list[int]:
        """For each query row the end of what it sees of its sequence."""
        first, end = self.together or (0, 0)
        return [
            max(position + 1, min(end, length)) if first <= position else position + 1
            for num_rows, length in self.sequences
            for position in range(length - num_rows, length)
        ]

    @property
    def begins(self) -> list[int]:
        """For each sequence the first position that its rows see; no later than the first of them."""
        more = [self.begin + number if self.begin else 0 for number in range(len(self.sequences))]
        return [min(begin, length - num_rows) for begin, (num_rows, length) in zip(more, self.sequences, strict=True)]

    @property
    def kept_as(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE[self.dtype], CACHE_TOLERANCE[self.kept_as])


MIX = AttentionCase().sequences
ONES = ((1, 3), (1, 64), (1, 65), (1, 130), (1, 17))
LONG = ((3, 1100), (1, 700), (40, 600))  # several partitions of 512 keys
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = (torch.int8, torch.float8_e4m3fn)
CACHE_DTYPES = (*DTYPES, *CODES)
# A cache of another type than the model.
MIXED = tuple((d, c) for d in DTYPES for c in CACHE_DTYPES if c != d)


def _latent(**changes: Any) -> AttentionCase:
    """Latent attention: one head of keys for all of queries."""
    sizes = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 96, "value_dim": 80, "values_in_keys": True}
    return AttentionCase(**{**sizes, **changes})


ATTENTION_CASES = (
    *(AttentionCase(block_size=b, dtype=d, sequences=s) for b in (1, 8, 16, 32) for d in DTYPES for s in (MIX, ONES)),
    *(AttentionCase(head_dim=d, dtype=t) for d in (16, 32, 80, 96, 128, 192, 256) for t in DTYPES),
    *(AttentionCase(head_dim=d, dtype=torch.bfloat16, cache_dtype=c)
      for d in (32, 64, 80, 96, 192, 256) for c in CODES),
    *(AttentionCase(dtype=d, cache_dtype=c, head_dim=128) for d, c in MIXED),
    *(AttentionCase(cache_dtype=c, block_size=b, sequences=s) for c in CODES for b in (1, 32) for s in (ONES, LONG)),
    *(AttentionCase(cache_dtype=c, value_dim=20, sliding_window=33, has_sinks=True, soft_cap=20.0) for c in CODES),
    *(AttentionCase(num_heads=g, num_kv_heads=1, dtype=d, sequences=MIX if g % 2 else ONES)
      for g in range(1, 17) for d in (torch.float32, torch.bfloat16)),
    *(AttentionCase(head_dim=d, value_dim=e, dtype=t) for d, e in ((64, 32), (96, 80), (24, 20)) for t in DTYPES),
    *(AttentionCase(num_heads=h, num_kv_heads=k) for h, k in ((1, 1), (3, 3), (7, 1), (8, 2), (16, 8), (100, 1))),
    *(AttentionCase(sliding_window=w, sequences=s) for w in (1, 5, 16, 33, 1000) for s in (MIX, ONES)),
    *(AttentionCase(sliding_window=w, sequences=LONG, dtype=d) for w in (0, 100, 600) for d in DTYPES),
    *(AttentionCase(soft_cap=c, dtype=d) for c in (5.0, 30.0) for d in DTYPES),
    *(AttentionCase(has_sinks=True, sliding_window=w, sequences=s, dtype=d)
      for w in (0, 20) for s in (MIX, ONES, LONG) for d in DTYPES),
    AttentionCase(has_sinks=True, soft_cap=20.0, sliding_window=40, sequences=LONG, num_heads=6, block_size=8),
    *(AttentionCase(has_slopes=True, sequences=s, dtype=d) for s in (MIX, ONES, LONG) for d in DTYPES),
    *(AttentionCase(num_distances=n, sequences=s, dtype=d) for n in (1, 24) for s in (MIX, ONES, LONG) for d in DTYPES),
    *(AttentionCase(begin=b, num_distances=33, sequences=s, dtype=d, head_dim=h)
      for b, h in ((5, 64), (40, 24), (300, 64)) for s in (MIX, ONES, LONG) for d in DTYPES[:2]),
    AttentionCase(begin=70, num_distances=9, sliding_window=40, has_sinks=True, soft_cap=20.0, cache_dtype=torch.int8),
    AttentionCase(begin=70, num_distances=200, num_heads=40, num_kv_heads=1, sequences=LONG, block_size=8),
    AttentionCase(has_slopes=True, has_sinks=True, soft_cap=20.0, sliding_window=40, cache_dtype=torch.int8),
    AttentionCase(sequences=((130, 130), (100, 400))),  # more rows than one tile
    AttentionCase(sequences=((0, 0), (0, 5), (1, 1))),
    *(_latent(dtype=d, sequences=s) for d in DTYPES for s in (MIX, ONES, LONG)),
    *(_latent(dtype=d, cache_dtype=c, block_size=8) for d, c in MIXED),
    *(_latent(num_heads=h, head_dim=d, value_dim=e, dtype=t)
      for h, d, e in ((1, 24, 8), (128, 576, 512), (3, 100, 84)) for t in (torch.float32, torch.bfloat16)),
    _latent(sliding_window=33, has_sinks=True, soft_cap=20.0),
    *(AttentionCase(sliding_window=w, is_chunked=True, sequences=s) for w in (1, 5, 16, 64, 1000) for s in (MIX, ONES)),
    *(AttentionCase(sliding_window=w, is_chunked=True, sequences=LONG, dtype=d)
      for w in (24, 100, 600) for d in DTYPES),
    *(AttentionCase(together=(s, e), sliding_window=w, sequences=q)
      for s, e in ((0, 9), (53, 68), (30, 600)) for w in (0, 20) for q in (MIX, LONG, ((60, 61), (1, 5), (70, 70)))),
    *(AttentionCase(together=(40, 300), num_heads=8, head_dim=h, dtype=d, sequences=((290, 310), (1, 90)))
      for h in (64, 256) for d in DTYPES),
    AttentionCase(together=(3, 60), has_sinks=True, soft_cap=20.0, sequences=((70, 70),), cache_dtype=torch.int8),
)  # fmt: skip
