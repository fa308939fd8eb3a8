"""The experts of each token, and how much each of them counts. A program is one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.worker.kernels.triton.example_inputs import floats
from quire.worker.kernels.triton.launch import Example, launch
from quire.worker.kernels.triton.rows import block_of, warps_of


@triton.jit
def _first_of_greatest(values, place):
    """(the greatest, the lowest place that has it); what is no number is never chosen twice"""
    greatest = tl.max(values)
    return greatest, tl.min(tl.where(values == greatest, place, 1 << 30))


@triton.jit
def _route_tokens(
    logits, bias, weights, ids,
    stride, num_experts, group_size, scale,
    has_bias: tl.constexpr, is_sigmoid: tl.constexpr, is_normalised: tl.constexpr, top_k: tl.constexpr,
    num_groups: tl.constexpr, top_groups: tl.constexpr, num_best: tl.constexpr,
    block: tl.constexpr, groups_block: tl.constexpr, top_block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, block)
    is_expert = expert < num_experts
    logit = tl.load(logits + token * stride + expert, is_expert, float("-inf")).to(tl.float32)
    # NaN would find no place; the token fails anyway
    logit = tl.where(logit == logit, logit, float("-inf"))
    if is_sigmoid:
        score = tl.math.div_rn(1.0, 1.0 + tl.exp(-logit))
    else:
        # a token whose logits are all -inf gets something
        greatest = tl.maximum(tl.max(logit), -3.0e38)
        exponential = tl.exp(logit - greatest)
        score = tl.math.div_rn(exponential, tl.maximum(tl.sum(exponential), 1e-30))
    rank = score
    if has_bias:
        rank += tl.load(bias + expert, is_expert, 0.0).to(tl.float32)
    rank = tl.where(is_expert & (rank == rank), rank, float("-inf"))
    if top_groups < num_groups:
        group = tl.arange(0, groups_block)
        of_group = tl.full([groups_block], float("-inf"), tl.float32)
        for number in range(num_groups):
            mine = tl.where(expert // group_size == number, rank, float("-inf"))
            best, at = _first_of_greatest(mine, expert)
            if num_best == 2:
                second, _ = _first_of_greatest(tl.where(expert == at, float("-inf"), mine), expert)
                best += second
            of_group = tl.where(group == number, best, of_group)
        is_in = tl.zeros([block], tl.int1)
        for _ in range(top_groups):
            best, at = _first_of_greatest(of_group, group)
            is_in = is_in | (expert // group_size == at)
            # a group that is chosen stays chosen, even where all others are as bad as can be
            of_group = tl.where(group == at, float("nan"), of_group)
        rank = tl.where(is_in, rank, float("-inf"))
    chosen = tl.arange(0, top_block)
    weight = tl.zeros([top_block], tl.float32)
    number = tl.zeros([top_block], tl.int32)
    is_left = is_expert
    for place in range(top_k):
        best = tl.max(tl.where(is_left, rank, float("-inf")))
        at = tl.min(tl.where(is_left & (rank == best), expert, block - 1))
        weight = tl.where(chosen == place, tl.sum(tl.where(expert == at, score, 0.0)), weight)
        number = tl.where(chosen == place, at, number)
        is_left = is_left & (expert != at)
    if is_normalised:
        weight = tl.math.div_rn(weight, tl.sum(weight) + 1e-20)
    tl.store(weights + token * top_k + chosen, weight * scale, chosen < top_k)
    tl.store(ids + token * top_k + chosen, number, chosen < top_k)


def route_tokens(
    logits_TX: Tensor,
    bias_X: Tensor | None,
    top_k: int,
    is_sigmoid: bool,
    is_normalised: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits_TX.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits_TX.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits_TX.device)
    if logits_TX.stride(-1) != 1:
        logits_TX = logits_TX.contiguous()
    block = block_of(num_experts)
    group_size = num_experts // num_groups
    launch(
        _route_tokens,
        (num_tokens,),
        logits_TX,
        logits_TX if bias_X is None else bias_X.contiguous(),
        weights,
        ids,
        logits_TX.stride(0),
        num_experts,
        group_size,
        scale,
        has_bias=bias_X is not None,
        is_sigmoid=is_sigmoid,
        is_normalised=is_normalised,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        num_best=1 if bias_X is None else min(2, group_size),
        block=block,
        groups_block=block_of(num_groups),
        top_block=block_of(top_k),
        num_warps=warps_of(block),
    )
    return weights, ids


def _example(num_experts: int, top_k: int, num_groups: int, top_groups: int) -> object:
    logits = floats(2048, num_experts)
    bias = floats(num_experts, dtype=torch.float32) if num_groups > 1 else None
    return route_tokens(logits, bias, top_k, num_groups > 1, True, num_groups, top_groups, 1.0)


EXAMPLES = (
    Example("Qwen3-30B-A3B", lambda: _example(128, 8, 1, 1)),
    Example("DeepSeek-V3", lambda: _example(256, 8, 8, 4)),
)
