"""From processed logits to one token a row: the best, or one drawn by a uniform number, as `reference/draw.py` defines.

Nothing is sorted. Where top_k or top_p limit a row, three searches (`row_search.py`) find the last weight that top_k
keeps, the last that top_p keeps of these, and the one that the number falls on; equal weights follow each other by
token. Without a limit the order is that of tokens, and two passes find the place. A program is a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.best_tokens import best_tokens, order_of, row_of
from quire.worker.kernels.triton.example_inputs import floats, on_host
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.row_search import find_level, weights_of
from quire.worker.staging import to_device

_BLOCK = 2048
# Weights that are added up in float32; their sums are added up in float64.
_CHUNK = 256


@triton.jit
def _below(value, bound):
    """Less than the bound, so that a running sum always passes it."""
    before = (bound.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    return tl.where(bound > 0, tl.minimum(value, before), 0.0)


@triton.jit
def _inverse(value):
    """One over a number of float64, which is a float32 at the least: a quotient would be a call with a stack."""
    result = (1.0 / value.to(tl.float32)).to(tl.float64)
    result = result * (2.0 - value * result)
    return result * (2.0 - value * result)


@triton.jit
def _weight_of(level):
    return level.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _draw_from_all(
    logits, vocab_size, top, coldness, min_p, uniform, block: tl.constexpr, chunk: tl.constexpr
):  # fmt: skip
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, block):
        weight = weights_of(logits, start + tl.arange(0, block), vocab_size, top, coldness, min_p)
        total += tl.sum(tl.sum(tl.reshape(weight, [block // chunk, chunk]), axis=1).to(tl.float64))
    target = _below(tl.load(uniform) * total, total)
    before = tl.zeros([], tl.float64)
    start = 0
    size = tl.zeros([], tl.float64)
    is_searching = True
    while is_searching:
        weight = weights_of(logits, start + tl.arange(0, block), vocab_size, top, coldness, min_p)
        size = tl.sum(tl.sum(tl.reshape(weight, [block // chunk, chunk]), axis=1).to(tl.float64))
        is_searching = (before + size <= target) & (start + block < vocab_size)
        if is_searching:
            before += size
            start += block
    weight = weights_of(logits, start + tl.arange(0, block), vocab_size, top, coldness, min_p)
    sums = tl.cumsum(weight.to(tl.float64))
    # the sum of a block in one order and in another differ a little: go on with the share of the block
    share = (target - before) * _inverse(tl.maximum(size, 1e-30))
    whole = tl.max(sums)
    passed = tl.sum((sums <= _below(share * whole, whole)).to(tl.int32))
    return start + tl.minimum(passed, tl.minimum(block, vocab_size - start) - 1)


@triton.jit
def _draw_from_first(
    logits, vocab_size, top, coldness, min_p, uniform, top_k, top_p, block: tl.constexpr
):  # fmt: skip
    # what is kept: all above a level, and some that lie on it, in the order of tokens
    last_level = tl.zeros([], tl.int64)
    num_last = tl.zeros([], tl.float64) + vocab_size
    mass = tl.zeros([], tl.float64)
    if top_k < vocab_size:
        limit = top_k.to(tl.float64)
        last_level, above = find_level(
            logits, vocab_size, top, coldness, min_p, limit, is_strict=False, is_weights=True, is_sum=False,
            block=block,
        )  # fmt: skip
        num_last = limit - above
        mass = num_last * _weight_of(last_level)
    for start in range(0, vocab_size, block):
        weight = weights_of(logits, start + tl.arange(0, block), vocab_size, top, coldness, min_p)
        mass += tl.sum(tl.where(order_of(weight) > last_level, weight, 0.0)).to(tl.float64)
    if top_p < 1.0:
        needed = top_p * mass
        level, above = find_level(
            logits, vocab_size, top, coldness, min_p, needed, is_strict=False, is_weights=True, is_sum=True,
            block=block,
        )  # fmt: skip
        if level >= last_level:
            # as many of those on the level as are needed, one at the least
            weight = _weight_of(level)
            count = tl.maximum(tl.ceil((needed - above) * _inverse(tl.maximum(weight, 1e-30))), 1.0)
            num_last = tl.where(level > last_level, count, tl.minimum(count, num_last))
            last_level = level
            mass = above + num_last * weight
    target = _below(tl.load(uniform) * mass, mass)
    level, above = find_level(
        logits, vocab_size, top, coldness, min_p, target, is_strict=True, is_weights=True, is_sum=True, block=block
    )
    number = tl.floor((target - above) * _inverse(tl.maximum(_weight_of(level), 1e-30)))
    # sums in another order may lead a little too far
    if level < last_level:
        level = last_level
        number = num_last
    if level == last_level:
        number = tl.minimum(number, num_last - 1)
    number = tl.maximum(tl.minimum(number, vocab_size), 0).to(tl.int32)
    # the token of this number among those on the level, or the last of them
    token = 0
    start = 0
    is_searching = True
    while is_searching:
        place = start + tl.arange(0, block)
        own = weights_of(logits, place, vocab_size, top, coldness, min_p)
        is_equal = (order_of(own).to(tl.int64) == level) & (place < vocab_size)
        rank = tl.cumsum(is_equal.to(tl.int32))
        count = tl.max(rank)
        if count > 0:
            token = tl.max(tl.where(is_equal & (rank <= number + 1), place, 0))
        is_searching = (count <= number) & (start + block < vocab_size)
        number -= count
        start += block
    return token


@triton.jit(do_not_specialize=["min_ps", "uniforms"])
def _choose_tokens(
    logits, rows, tops, tokens, temperatures, top_ks, top_ps, min_ps, uniforms,
    stride, vocab_size,
    has_rows: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    temperature = tl.load(temperatures + number)
    if temperature > 0:
        own = logits + row_of(rows, number, has_rows) * stride
        # one over the temperature: a product for each token instead of a quotient
        coldness = 1.0 / tl.maximum(temperature, 1e-30)
        top = tl.load(tops + number)
        top_k = tl.load(top_ks + number)
        top_p = tl.load(top_ps + number)
        min_p = tl.load(min_ps + number)
        uniform = uniforms + number
        if (top_k < vocab_size) | (top_p < 1.0):
            token = _draw_from_first(own, vocab_size, top, coldness, min_p, uniform, top_k, top_p, block)
        else:
            token = _draw_from_all(own, vocab_size, top, coldness, min_p, uniform, block, chunk)
        tl.store(tokens + number, token.to(tl.int64))


def choose_tokens(
    logits_NV: Tensor,
    rows_n: Tensor | None,
    temperature_n: Tensor,
    top_k_n: Tensor,
    top_p_n: Tensor,
    min_p_n: Tensor,
    uniform_n: Tensor,
) -> tuple[Tensor, Tensor]:
    tokens, tops = best_tokens(logits_NV, rows_n)
    if not logits_NV.is_meta and not (temperature_n.numpy() > 0).any():
        return tokens, tops
    settings = (temperature_n, top_k_n, top_p_n, min_p_n, uniform_n)
    if not logits_NV.is_meta:
        settings = tuple(to_device([column.numpy() for column in settings], logits_NV.device))
    launch(
        _choose_tokens,
        (len(tokens),),
        logits_NV,
        logits_NV if rows_n is None else rows_n,
        tops,
        tokens,
        *settings,
        logits_NV.stride(0),
        logits_NV.shape[1],
        has_rows=rows_n is not None,
        block=_BLOCK,
        chunk=_CHUNK,
        num_warps=8,
        registers=96,
    )
    return tokens, tops


def _example() -> object:
    temperatures = on_host([0.8] * 256, torch.float32)
    least = on_host([0.0] * 256, torch.float32)
    shares = on_host([0.9] * 256, torch.float64)
    uniform = on_host((row / 256 for row in range(256)), torch.float64)
    return choose_tokens(floats(256, 128256), None, temperatures, on_host([50] * 256), shares, least, uniform)


EXAMPLES = (Example("256 rows of 8B", _example),)
