"""Derivatives of the operators: the forward of training is the served kernel, its backward that of the specification.

`kernels/reference/` says in plain PyTorch what each operator means, and PyTorch can derive that. So an operator's
backward computes the specification once more and lets autograd go through it; only products with packed weights have a
backward of their own (`products.py`). No model and no layer knows of it: PyTorch's dispatcher comes here before it goes
to a kernel. Where a step is served, in inference mode, it never does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.worker.attention import Attention, AttentionBatch
from quire.worker.attention.layer import layer_of as attention_layer_of
from quire.worker.forward_context import current_forward_context
from quire.worker.kernels import operators, reference
from quire.worker.kernels.reference.paged_attention import paged_attention
from quire.worker.kernels.reference.write_kv import write_kv
from quire.worker.state_cache import layer_of as recurrent_layer_of
from quire.worker.training.products import PRODUCTS

# operators whose results follow from their tensors alone: no memory is written
_PURE = (
    "rms_norm",
    "add_rms_norm",
    "gated_rms_norm",
    "silu_and_mul",
    "clamped_swiglu",
    "add",
    "multiply",
    "convert",
    "scale",
    "activate",
    "layer_norm",
    "look_up",
    "join",
    "route_tokens",
    "weigh_experts",
    "token_logprobs",
)
# Inside of `recurrent`, which is what is derived: they are met with gradients when its specification is computed.
_RECURRENCES = ("causal_conv", "gated_delta_rule", "ssd_scan")

_library = torch.library.Library("quire", "IMPL")
_below_autograd = torch._C._AutoDispatchBelowAutograd


@dataclass(frozen=True)
class _Operation:
    """One call. `serve` is the kernel with all its arguments, `specify` takes the inputs anew; `out` is what the kernel
    fills, if it is not told by what it returns."""

    serve: Callable[[], Any]
    specify: Callable[..., Any]
    num_inputs: int
    has_out: bool = False


class _Specified(torch.autograd.Function):
    """Its tensors: inputs, then parameters that `specify` knows by itself, then `out`."""

    @staticmethod
    def forward(ctx: Any, operation: _Operation, *tensors: Tensor) -> Any:
        ctx.operation = operation
        ctx.save_for_backward(*(tensors[:-1] if operation.has_out else tensors))
        with _below_autograd():
            results = operation.serve()
        if operation.has_out:
            ctx.mark_dirty(tensors[-1])
            return tensors[-1]
        ctx.mark_non_differentiable(*(one for one in _several(results) if not one.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        operation: _Operation = ctx.operation
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        inputs = [
            tensor.detach().requires_grad_(is_needed)
            for tensor, is_needed in zip(saved[: operation.num_inputs], needed, strict=False)
        ]
        with torch.enable_grad():
            results = _several(operation.specify(*inputs))
        known = [*inputs, *saved[operation.num_inputs :]]
        wanted = [index for index, tensor in enumerate(known) if needed[index]]
        pairs = [
            (result, gradient.to(result.dtype))
            for result, gradient in zip(results, gradients, strict=True)
            if result.requires_grad and gradient is not None
        ]
        answer: list[Tensor | None] = [None] * (len(known) + operation.has_out)
        if pairs:
            found = torch.autograd.grad(
                [result for result, _ in pairs],
                [known[index] for index in wanted],
                [gradient for _, gradient in pairs],
                allow_unused=True,
            )
            for index, gradient in zip(wanted, found, strict=True):
                answer[index] = gradient
        return (None, *answer)


class _Turn(torch.autograd.Function):
    """Rotary positions, in place: the way back is the turn by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, positions_T: Tensor, table_PR: Tensor, is_interleaved: bool) -> Tensor:
        ctx.save_for_backward(positions_T, table_PR)
        ctx.is_interleaved = is_interleaved
        with _below_autograd():
            operators.rotary_embedding(positions_T, x_THD, x_THD[:, :0], table_PR, is_interleaved)
        ctx.mark_dirty(x_THD)
        return x_THD

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        positions_T, table_PR = ctx.saved_tensors
        cos_Pr, sin_Pr = table_PR.chunk(2, dim=-1)
        turned = gradient.clone(memory_format=torch.contiguous_format)
        back_PR = torch.cat((cos_Pr, -sin_Pr), dim=-1)
        reference.rotary_embedding(positions_T, turned, turned[:, :0], back_PR, ctx.is_interleaved)
        return turned, None, None, None


def _several(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    """Those of the arguments, also of lists, in order."""
    flat = [item for one in arguments for item in (one if isinstance(one, list) else [one])]
    return [item for item in flat if isinstance(item, Tensor)]


def _with_tensors(arguments: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """The same arguments with other tensors in the places of theirs."""
    others = iter(tensors)

    def exchanged(one: Any) -> Any:
        if isinstance(one, list):
            return [exchanged(item) for item in one]
        return next(others) if isinstance(one, Tensor) else one

    return [exchanged(one) for one in arguments]


def _asks(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _pure(name: str) -> Callable[..., Any]:
    kernel = getattr(operators, name)
    specification = getattr(reference, name)

    def run(*arguments: Any) -> Any:
        tensors = _tensors(arguments)
        serve = partial(kernel, *arguments)
        if not _asks(tensors):
            with _below_autograd():
                return serve()

        def specify(*inputs: Tensor) -> Any:
            return specification(*_with_tensors(arguments, inputs))

        return _Specified.apply(_Operation(serve, specify, len(tensors)), *tensors)

    return run


def _recurrence(name: str) -> Callable[..., Any]:
    kernel = getattr(operators, name)
    specification = getattr(reference, name)

    def run(*arguments: Any) -> Any:
        if _asks(_tensors(arguments)):
            return specification(*arguments)
        with _below_autograd():
            return kernel(*arguments)

    return run


def _rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, table: Tensor, is_interleaved: bool = False
) -> None:
    if not _asks([query, key]):
        with _below_autograd():
            operators.rotary_embedding(positions, query, key, table, is_interleaved)
        return
    for x in (query, key):
        if x.shape[1]:
            _Turn.apply(x, positions, table, is_interleaved)


def _attention(query: Tensor, key: Tensor | None, value: Tensor | None, out: Tensor, index: int) -> None:
    serve = partial(torch.ops.quire.attention.default, query, key, value, out, index)
    inputs = [tensor for tensor in (query, key, value) if tensor is not None]
    layer = attention_layer_of(index)
    parameters = [] if layer.sinks is None else [layer.sinks]
    if not _asks([*inputs, *parameters]):
        with _below_autograd():
            serve()
        return
    metadata = current_forward_context().metadata[layer.group]
    if key is None or not isinstance(metadata, AttentionBatch):
        raise ModelError(
            f"{layer.name}: it reads what another layer keeps, or its attention backend comes from elsewhere: no "
            "derivative of that is built, so that this model cannot be trained."
        )
    specify = partial(_attended, layer, metadata, list(out.shape))
    _Specified.apply(_Operation(serve, specify, len(inputs), has_out=True), *inputs, *parameters, out)


def _attended(
    layer: Attention,
    batch: AttentionBatch,
    shape: list[int],
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKE: Tensor | None = None,
) -> Tensor:
    """What is written into the cache and read from there, in a cache of its own."""
    assert layer.k_cache is not None
    assert layer.v_cache is not None
    k_cache = torch.zeros_like(layer.k_cache, memory_format=torch.contiguous_format)
    v_cache = k_cache
    if value_TKE is not None:
        v_cache = torch.zeros_like(layer.v_cache, memory_format=torch.contiguous_format)
    write_kv(key_TKD, value_TKE, k_cache, v_cache, batch.slots_T)
    out_THE = query_THD.new_zeros(shape)
    paged_attention(
        query_THD,
        k_cache,
        v_cache if value_TKE is not None else k_cache,
        batch.block_tables_SM,
        batch.seq_lens_S,
        batch.query_starts_S1,
        out_THE,
        layer.sinks,
        batch.ends_T,
        layer.scale,
        layer.sliding_window,
        layer.is_chunked,
        layer.soft_cap,
        layer.slopes,
    )
    return out_THE


def _recurrent(inputs: list[Tensor], out: Tensor, index: int) -> None:
    serve = partial(torch.ops.quire.recurrent.default, inputs, out, index)
    layer = recurrent_layer_of(index)
    parameters = list(layer.parameters(recurse=False))
    if not _asks([*inputs, *parameters]):
        with _below_autograd():
            serve()
        return
    if not layer.is_kernel:
        raise ModelError(
            f"{layer.name}: {type(layer).__name__} changes its states by itself, and no derivative of that is built, "
            "so that this model cannot be trained."
        )
    states = current_forward_context().states.of(layer)

    def specify(*given: Tensor) -> Tensor:
        result = torch.zeros_like(out)
        layer.change(replace(states, places=[torch.zeros_like(place) for place in states.places]), list(given), result)
        return result

    _Specified.apply(_Operation(serve, specify, len(inputs), has_out=True), *inputs, *parameters, out)


@cache
def register() -> None:
    """From now on PyTorch comes here where gradients are asked for. Once a process."""
    for name in _PURE:
        _library.impl(name, _pure(name), "Autograd")
    for name in _RECURRENCES:
        _library.impl(name, _recurrence(name), "Autograd")
    for name, function in PRODUCTS.items():
        _library.impl(name, function, "Autograd")
    _library.impl("rotary_embedding", _rotary_embedding, "Autograd")
    _library.impl("attention", _attention, "Autograd")
    _library.impl("recurrent", _recurrent, "Autograd")
