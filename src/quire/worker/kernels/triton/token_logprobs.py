"""Log-probabilities of the tokens of rows, and of the best tokens, which alone are sorted. A program is a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels import reference
from quire.worker.kernels.triton.best_tokens import best_tokens, key_of, order_of, row_of, value_of
from quire.worker.kernels.triton.example_inputs import floats, given
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.row_search import find_level
from quire.worker.kernels.triton.rows import block_of

_BLOCK = 2048
# More best tokens than this are a matter of torch's own sorting.
_MOST = 1024


@triton.jit
def _token_logprobs(
    logits, rows, tops, tokens, logprobs, ranks, keys, log_sums,
    stride, vocab_size,
    has_rows: tl.constexpr, most: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    own = logits + row_of(rows, number, has_rows) * stride
    top = tl.load(tops + number)
    token = tl.load(tokens + number)
    value = tl.load(own + token).to(tl.float32)
    own_key = key_of(value, token, vocab_size)
    total = tl.zeros([], tl.float64)
    rank = tl.zeros([], tl.int32) + 1
    for start in range(0, vocab_size, block):
        place = start + tl.arange(0, block)
        other = tl.load(own + place, place < vocab_size, float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(other - top)).to(tl.float64)
        is_greater = (key_of(other, place, vocab_size) > own_key) & (place < vocab_size)
        rank += tl.sum(is_greater.to(tl.int32))
    # in float32, as the specification
    log_sum = tl.log(total.to(tl.float32))
    tl.store(logprobs + number, value - top - log_sum)
    tl.store(log_sums + number, log_sum)
    tl.store(ranks + number, rank.to(tl.int64))
    if most > 0:
        level, above = find_level(
            own, vocab_size, 0.0, 1.0, 0.0, most, is_strict=False, is_weights=False, is_sum=False, block=block
        )
        # those above the level, and the first ones on it
        num_above = above.to(tl.int32)
        first = 0
        first_equal = num_above
        for start in range(0, vocab_size, block):
            place = start + tl.arange(0, block)
            other = tl.load(own + place, place < vocab_size, float("-inf")).to(tl.float32)
            key = key_of(other, place, vocab_size)
            order = order_of(other).to(tl.int64)
            is_above = (order > level) & (place < vocab_size)
            is_equal = (order == level) & (place < vocab_size)
            rank_above = tl.cumsum(is_above.to(tl.int32))
            rank_equal = tl.cumsum(is_equal.to(tl.int32))
            tl.store(keys + number * most + first + rank_above - 1, key, is_above)
            target = first_equal + rank_equal - 1
            tl.store(keys + number * most + target, key, is_equal & (target < most))
            first += tl.max(rank_above)
            first_equal += tl.max(rank_equal)


@triton.jit
def _sort_best(keys, tops, log_sums, ids, best, vocab_size, most: tl.constexpr, block: tl.constexpr):
    number = tl.program_id(0)
    place = tl.arange(0, block)
    key = tl.load(keys + number * most + place, place < most, -(1 << 63))
    key = tl.sort(key, descending=True)
    value = value_of((key >> 32).to(tl.int32))
    logprob = value - tl.load(tops + number) - tl.load(log_sums + number)
    tl.store(ids + number * most + place, vocab_size - 1 - (key & 0xFFFFFFFF), place < most)
    tl.store(best + number * most + place, logprob, place < most)


def token_logprobs(
    logits_NV: Tensor, rows_n: Tensor | None, tokens_n: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if most > _MOST:
        return reference.token_logprobs(logits_NV, rows_n, tokens_n, most)
    _, tops = best_tokens(logits_NV, rows_n)
    count = len(tops)
    vocab_size = logits_NV.shape[1]
    logprobs = torch.empty_like(tops)
    log_sums = torch.empty_like(tops)
    ranks = torch.empty(count, dtype=torch.int64, device=tops.device)
    # a kernel is made for each width: there are few
    width = min(block_of(most), vocab_size) if most else 0
    keys = torch.empty((count, width), dtype=torch.int64, device=tops.device)
    ids = torch.empty_like(keys)
    best = torch.empty((count, width), dtype=torch.float32, device=tops.device)
    launch(
        _token_logprobs,
        (count,),
        logits_NV,
        logits_NV if rows_n is None else rows_n,
        tops,
        tokens_n,
        logprobs,
        ranks,
        keys,
        log_sums,
        logits_NV.stride(0),
        vocab_size,
        has_rows=rows_n is not None,
        most=width,
        block=_BLOCK,
        num_warps=8,
    )
    if width:
        launch(_sort_best, (count,), keys, tops, log_sums, ids, best, vocab_size, most=width, block=block_of(width))
    return logprobs, ranks, ids[:, :most], best[:, :most]


def _example() -> object:
    return token_logprobs(floats(256, 128256), None, given(range(256)), 20)


EXAMPLES = (Example("256 rows of 8B", _example),)
