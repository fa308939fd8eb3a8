"""Derivatives of products with packed weights and with adapters.

A packed weight is bytes, which have no gradient. Whoever trains it says with `stand_for` which tensor it stands for:
that one gets the gradient, in float32 and unrounded. One that stands for nothing is only gone through. Codes count as
the numbers that they stand for, and inputs that are rounded on the way as if they were not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.worker.kernels import operators

_MASTER = "quire_master"
_below_autograd = torch._C._AutoDispatchBelowAutograd


class LowRankMaster(NamedTuple):
    """What a slot stands for in one part of a layer: a [rank, inputs], b [outputs, rank], and which outputs."""

    a: Tensor
    b: Tensor
    scale: float
    outputs: slice


def stand_for(packed: Tensor, master: Callable[[], Any]) -> None:
    """`master` is asked at each product: for a tensor, or of adapters' slots for a list of LowRankMaster."""
    setattr(packed, _MASTER, master)


def _master_of(packed: Tensor) -> Any:
    master = getattr(packed, _MASTER, None)
    return None if master is None else master()


def _asks(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _served(serve: Callable[[], Any]) -> Any:
    with _below_autograd():
        return serve()


class _Linear(torch.autograd.Function):
    """x W^T + bias."""

    @staticmethod
    def forward(
        ctx: Any, serve: Callable[[], Tensor], packed: Tensor, x: Tensor, bias: Tensor | None, master: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(packed, x)
        return _served(serve)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        packed, x = ctx.saved_tensors
        _, _, needs_x, needs_bias, needs_master = ctx.needs_input_grad
        of_y = gradient.float()
        of_x = (of_y @ operators.unpack_weight(packed)).to(x.dtype) if needs_x else None
        of_bias = of_y.flatten(0, -2).sum(0) if needs_bias else None
        of_master = of_y.flatten(0, -2).t() @ x.float().flatten(0, -2) if needs_master else None
        return None, None, of_x, of_bias, of_master


class _Rows(torch.autograd.Function):
    """Rows of a packed weight by their numbers."""

    @staticmethod
    def forward(ctx: Any, serve: Callable[[], Tensor], ids_T: Tensor, master: Tensor) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.shape = master.shape
        return _served(serve)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ids_T,) = ctx.saved_tensors
        of_master = gradient.new_zeros(ctx.shape, dtype=torch.float32)
        return None, None, of_master.index_add_(0, ids_T, gradient.float())


class _Grouped(torch.autograd.Function):
    """A product an expert. Its tensors: x, biases (all or none), masters (all or none)."""

    @staticmethod
    def forward(
        ctx: Any,
        serve: Callable[[], Tensor],
        packed: list[Tensor],
        ids_TK: Tensor,
        num_biases: int,
        x: Tensor,
        *others: Tensor,
    ) -> Tensor:
        ctx.packed = packed
        ctx.num_biases = num_biases
        ctx.save_for_backward(ids_TK, x)
        return _served(serve)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ids_TK, x = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        num_tokens, top_k = ids_TK.shape
        rows_TKC = (x.unsqueeze(1).expand(num_tokens, top_k, x.shape[-1]) if x.ndim == 2 else x).float()
        of_rows_TKC = torch.zeros_like(rows_TKC, memory_format=torch.contiguous_format)
        of_others: list[Tensor | None] = [None] * (len(needed) - 1)
        for number, weight in enumerate(ctx.packed):
            is_own_TK = ids_TK == number
            of_y = gradient[is_own_TK].float()
            if needed[0]:
                of_rows_TKC[is_own_TK] = of_y @ operators.unpack_weight(weight)
            if ctx.num_biases and needed[1 + number]:
                of_others[number] = of_y.sum(0)
            if len(of_others) > ctx.num_biases and needed[1 + ctx.num_biases + number]:
                of_others[ctx.num_biases + number] = of_y.t() @ rows_TKC[is_own_TK]
        of_x = of_rows_TKC.sum(1) if x.ndim == 2 else of_rows_TKC
        return None, None, None, None, of_x.to(x.dtype) if needed[0] else None, *of_others


class _Adapters(torch.autograd.Function):
    """y += scale * B (A x), in place, for the rows that have the slot. Its tensors: x, then a and b of each part."""

    @staticmethod
    def forward(
        ctx: Any,
        serve: Callable[[], None],
        parts: list[LowRankMaster],
        slots_T: Tensor,
        y: Tensor,
        x: Tensor,
        *_: Tensor,
    ) -> Tensor:
        _served(serve)
        ctx.parts = parts
        ctx.save_for_backward(slots_T, x)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        slots_T, x = ctx.saved_tensors
        has_adapter_T1 = (slots_T == 0).unsqueeze(1)
        own_x = x.float() * has_adapter_T1
        own_y = gradient.float() * has_adapter_T1
        of_x = torch.zeros_like(own_x)
        of_parts: list[Tensor] = []
        for part in ctx.parts:
            # as they are served
            a, b = part.a.detach().to(x.dtype).float(), (part.b.detach().float() * part.scale).to(x.dtype).float()
            of_part = own_y[:, part.outputs]
            of_low = of_part @ b
            of_parts += [of_low.t() @ own_x, (of_part.t() @ (own_x @ a.t())) * part.scale]
            of_x += of_low @ a
        return None, None, None, gradient, of_x.to(x.dtype), *of_parts


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, num_rows: int) -> Any:
    return _linear(partial(operators.packed_linear, x, packed, bias, num_rows), x, packed, bias)


def _sliced_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, num_rows: int, num_slices: int, dtype: torch.dtype
) -> Any:
    return _linear(partial(operators.sliced_linear, x, packed, bias, num_rows, num_slices, dtype), x, packed, bias)


def _linear(serve: Callable[[], Tensor], x: Tensor, packed: Tensor, bias: Tensor | None) -> Any:
    master = _master_of(packed)
    return _Linear.apply(serve, packed, x, bias, master) if _asks(x, bias, master) else _served(serve)


def _packed_rows(packed: Tensor, ids: Tensor, dtype: torch.dtype, num_columns: int, first: int | None = None) -> Any:
    serve = partial(operators.packed_rows, packed, ids, dtype, num_columns, first)
    master = _master_of(packed)
    return _Rows.apply(serve, ids, master) if _asks(master) else _served(serve)


def _grouped_linear(
    x: Tensor,
    ids: Tensor | None,
    packed: list[Tensor],
    biases: list[Tensor],
    num_rows: int,
    counts: Tensor | None,
    first: int = 0,
) -> Any:
    serve = partial(operators.grouped_linear, x, ids, packed, biases, num_rows, counts, first)
    masters: Sequence[Tensor] = [master for one in packed if (master := _master_of(one)) is not None]
    if not _asks(x, *biases, *masters):
        return _served(serve)
    if ids is None:
        ids = torch.arange(len(packed), device=x.device).expand(x.shape[0], -1)
    return _Grouped.apply(serve, packed, ids - first, len(biases), x, *biases, *masters)


def _add_adapters(
    y: Tensor, x: Tensor, slots: Tensor, ranks: Tensor, a: Tensor, b: Tensor, parts: list[int], most_rank: int
) -> None:
    serve = partial(operators.add_adapters, y, x, slots, ranks, a, b, parts, most_rank)
    masters: list[LowRankMaster] = _master_of(a) or []
    matrices = [matrix for part in masters for matrix in (part.a, part.b)]
    if _asks(y, x, *matrices):
        _Adapters.apply(serve, masters, slots, y, x, *matrices)
    else:
        _served(serve)


PRODUCTS: dict[str, Callable[..., Any]] = {
    "packed_linear": _packed_linear,
    "sliced_linear": _sliced_linear,
    "packed_rows": _packed_rows,
    "grouped_linear": _grouped_linear,
    "add_adapters": _add_adapters,
}
