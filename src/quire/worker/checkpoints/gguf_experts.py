"""Tensors of a GGUF file that hold several matrices, as tensors of one matrix each, without reading them.

    blk.3.ffn_gate_exps.weight     [experts, N, K]    ->  blk.3.ffn_gate.0.weight ..., as the oldest files name them
    blk.3.ffn_gate_up_exps.weight  [experts, 2 N, K]  ->  blk.3.ffn_gate.0.weight, blk.3.ffn_up.0.weight ...
    blk.3.ffn_gate_exps.bias       [experts, N]       ->  blk.3.ffn_gate.0.bias ...
    blk.3.attn_k_b.weight          [heads, N, K]      ->  the same, [heads * N, K]

What belongs to an expert comes together, so that it is packed before the next one is read: a layer of them never stands
in memory beside its packed weights. Called by `gguf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from quire.config.gguf_file import GGUFTensor
from quire.errors import ModelError

_STACKED = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_ALONE = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_OF_ALL_HEADS = re.compile(r"blk\.\d+\.attn_[kv]_b\.weight")
# a vector where the model has a matrix of one row
_ONE_ROW = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")


def one_by_one(tensors: Iterable[GGUFTensor], num_experts: int) -> Iterator[GGUFTensor]:
    """Tensors of at most two dimensions. `num_experts`: of each layer that has them."""
    others: list[GGUFTensor] = []
    by_expert: dict[tuple[int, int], list[GGUFTensor]] = {}
    types: dict[tuple[int, str], GGUFTensor] = {}
    for tensor in tensors:
        if stacked := _STACKED.fullmatch(tensor.name):
            layer = int(stacked[1])
            for expert, parts in enumerate(_experts(tensor, stacked[2], stacked[3], num_experts)):
                by_expert.setdefault((layer, expert), []).extend(parts)
        elif alone := _ALONE.fullmatch(tensor.name):
            layer = int(alone[1])
            _check_alike(types.setdefault((layer, alone[2]), tensor), tensor)
            by_expert.setdefault((layer, int(alone[3])), []).append(tensor)
        else:
            others.append(_flat(tensor))
    yield from others
    for key in sorted(by_expert):
        yield from by_expert[key]


def _experts(tensor: GGUFTensor, kind: str, leaf: str, num_experts: int) -> Iterator[list[GGUFTensor]]:
    """The parts of each expert, which lie one after the other."""
    shape = tensor.shape
    is_right = len(shape) == (3 if leaf == "weight" else 2) and shape[0] == num_experts
    kinds = ("gate", "up") if kind == "gate_up" else (kind,)
    if not is_right or shape[1] % len(kinds):
        raise ModelError(
            f"{tensor.file}: {tensor.name} is {list(shape)}, expected are {num_experts} experts of it. "
            "Convert the model again."
        )
    prefix = tensor.name.partition(".ffn_")[0]
    num_rows = shape[1] // len(kinds)
    part_bytes = tensor.num_bytes // (num_experts * len(kinds))
    for expert in range(num_experts):
        start = tensor.offset + expert * len(kinds) * part_bytes
        yield [
            replace(
                tensor,
                name=f"{prefix}.ffn_{part}.{expert}.{leaf}",
                shape=(num_rows, *shape[2:]),
                offset=start + index * part_bytes,
            )
            for index, part in enumerate(kinds)
        ]


def _check_alike(first: GGUFTensor, tensor: GGUFTensor) -> None:
    """One kernel multiplies all experts of a layer."""
    if first.type_id != tensor.type_id:
        raise ModelError(
            f"{tensor.file}: {tensor.name} is of type {tensor.type_name}, and {first.name} of {first.type_name}: the "
            "experts of a layer must have one. Take a file that was made with stacked experts."
        )


def _flat(tensor: GGUFTensor) -> GGUFTensor:
    if _OF_ALL_HEADS.fullmatch(tensor.name) and len(tensor.shape) == 3:
        return replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))
    if _ONE_ROW.fullmatch(tensor.name) and len(tensor.shape) == 1:
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor
