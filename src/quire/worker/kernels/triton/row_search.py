"""Searches in rows too long to be sorted: for the place where what is counted from the greatest on reaches a bound.

A program is a row. Numbers are ordered whole ones (`order_of`). Each pass over the row counts, or sums up, what lies at
or above three numbers of a range, and keeps the quarter in which the bound is reached: 16 passes find one number of 32
bits. Sums are of float32 within a block and of float64 across blocks, in one order: a row gives the same bits among
whatever others, and what lies above a lower number is never less.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.worker.kernels.triton.best_tokens import order_of


@triton.jit
def weights_of(logits, token, vocab_size, top, coldness, min_p):
    """exp((logit - greatest) * coldness), 0 where it is below min_p; rows that are not finite get zeros."""
    is_token = token < vocab_size
    value = tl.load(logits + token, is_token, float("-inf")).to(tl.float32)
    weight = tl.exp((value - top) * coldness)
    is_kept = is_token & (weight >= min_p) & (weight <= 1.0)
    return tl.where(is_kept, weight, 0.0)


@triton.jit
def _above(order, weight, bound, is_sum: tl.constexpr):
    """The count, or the sum of the weights, of a block at or above the bound."""
    if is_sum:
        result = tl.sum(tl.where(order >= bound, weight, 0.0)).to(tl.float64)
    else:
        result = tl.sum((order >= bound).to(tl.int32)).to(tl.float64)
    return result


@triton.jit
def find_level(
    logits, vocab_size, top, coldness, min_p, needed,
    is_strict: tl.constexpr, is_weights: tl.constexpr, is_sum: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """(the greatest number at or above which the bound is reached, what lies above it). With `is_strict` it must be
    passed. Of weights, or of the logits as they are."""
    # weights go from 0 to 1
    low = tl.zeros([], tl.int64) + (0 if is_weights else -(1 << 31))
    high = tl.zeros([], tl.int64) + (0x3F800001 if is_weights else 1 << 31)
    beyond = tl.zeros([], tl.float64)
    while high - low > 1:
        step = tl.maximum((high - low) >> 2, 1)
        first = low + step
        second = tl.minimum(low + 2 * step, high)
        third = tl.minimum(low + 3 * step, high)
        of_first = tl.zeros([], tl.float64)
        of_second = tl.zeros([], tl.float64)
        of_third = tl.zeros([], tl.float64)
        for start in range(0, vocab_size, block):
            token = start + tl.arange(0, block)
            if is_weights:
                weight = weights_of(logits, token, vocab_size, top, coldness, min_p)
                order = tl.where(token < vocab_size, order_of(weight), -1).to(tl.int64)
            else:
                weight = tl.load(logits + token, token < vocab_size, 0.0).to(tl.float32)
                order = tl.where(token < vocab_size, order_of(weight).to(tl.int64), -(1 << 32))
            of_first += _above(order, weight, first, is_sum)
            of_second += _above(order, weight, second, is_sum)
            of_third += _above(order, weight, third, is_sum)
        if _is_reached(of_third, needed, is_strict) & (third < high):
            low = third
        elif _is_reached(of_second, needed, is_strict) & (second < high):
            low = second
            if third < high:
                high = third
                beyond = of_third
        elif _is_reached(of_first, needed, is_strict):
            low = first
            if second < high:
                high = second
                beyond = of_second
        else:
            high = first
            beyond = of_first
    return low, beyond


@triton.jit
def _is_reached(amount, needed, is_strict: tl.constexpr):
    if is_strict:
        result = amount > needed
    else:
        result = amount >= needed
    return result
