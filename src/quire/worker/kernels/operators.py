"""The torch operators of the namespace `quire`: schemas, shapes for tracing, and the home of last resort.

Every operator is defined once, here. The C++ library registers itself for tensors on the CPU when it is loaded, the
kernels in Triton are registered for those on a GPU; what has no faster home runs `reference/`. Either is loaded (and
built, if need be) by the first call: that lands in `_first_call` below, later ones go straight from the dispatcher.

`Library.define` and `impl` are used on purpose: a call costs 1 to 2 us, a call of `torch.library.custom_op` 8 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from quire.worker.kernels import reference

_Function = TypeVar("_Function", bound=Callable[..., Any])
# of a recurrent layer: sequence_states.py
_STATES = "Tensor(a!)[] places, int first_chunk, Tensor tables, Tensor starts, Tensor query_starts, Tensor num_kept"
_SCHEMAS = {
    "write_kv": "(Tensor key, Tensor? value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
    "int rank=0, int size=1) -> ()",
    "prepare_heads": "(Tensor positions, Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor? query_weight, "
    "Tensor? key_weight, float eps, Tensor cos_sin_cache, bool is_interleaved, Tensor(c!) k_cache, Tensor(d!) v_cache, "
    "Tensor slots) -> ()",
    "paged_attention": "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor query_starts, Tensor(a!) out, Tensor? sinks, Tensor? ends, float scale, int sliding_window, "
    "bool is_chunked, float soft_cap, Tensor? slopes=None, Tensor? begins=None, "
    "Tensor? bias=None) -> ()",
    "attention_part": "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor query_starts, Tensor? sinks, Tensor? ends, float scale, int sliding_window, bool is_chunked, "
    "float soft_cap, int value_dim, int rank, int size, Tensor? slopes=None, Tensor? begins=None, "
    "Tensor? bias=None) -> Tensor",
    "merge_attention": "(Tensor parts, Tensor(a!) out) -> ()",
    "copy_blocks": "(Tensor(a!)[] caches, Tensor pairs) -> ()",
    "move_blocks": "(Tensor[] sources, Tensor(a!)[] destinations, Tensor pairs) -> ()",
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    "gated_rms_norm": "(Tensor x, Tensor gate, Tensor weight, float eps, bool gates_first) -> Tensor",
    "silu_and_mul": "(Tensor x) -> Tensor",
    "clamped_swiglu": "(Tensor x, float alpha, float limit) -> Tensor",
    "add": "(Tensor x, Tensor y) -> Tensor",
    "multiply": "(Tensor x, Tensor y) -> Tensor",
    "convert": "(Tensor x, ScalarType dtype) -> Tensor",
    "scale": "(Tensor x, float factor, bool is_division=False) -> Tensor",
    "activate": "(Tensor x, int kind) -> Tensor",
    "layer_norm": "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    "look_up": "(Tensor table, Tensor ids, int? first=None) -> Tensor",
    "new_rows": "(Tensor like, int[] sizes) -> Tensor",
    "pack_weight": "(Tensor weight) -> Tensor",
    "pack_quantized": "(Tensor values, Tensor scales, Tensor? offsets, int bits, bool weight_only) -> Tensor",
    "unpack_weight": "(Tensor packed) -> Tensor",
    "packed_linear": "(Tensor x, Tensor packed, Tensor? bias, SymInt num_rows) -> Tensor",
    "sliced_linear": "(Tensor x, Tensor packed, Tensor? bias, SymInt num_rows, int num_slices, ScalarType dtype) "
    "-> Tensor",
    "all_reduce": "(Tensor x, Tensor? bias, Tensor(a!) meeting, int rank, int size, ScalarType dtype) -> Tensor",
    "all_gather": "(Tensor x, Tensor(a!) meeting, int rank, int size, SymInt total) -> Tensor",
    "send": "(Tensor x, Tensor(a!) meeting, int link, int num_links) -> ()",
    "receive": "(Tensor(a!) out, Tensor(b!) meeting, int link, int num_links) -> ()",
    "packed_rows": "(Tensor packed, Tensor ids, ScalarType dtype, SymInt num_columns, int? first=None) -> Tensor",
    "route_tokens": "(Tensor logits, Tensor? bias, int top_k, bool is_sigmoid, bool is_normalised, int num_groups, "
    "int top_groups, float scale) -> (Tensor, Tensor)",
    "grouped_linear": "(Tensor x, Tensor? ids, Tensor[] packed, Tensor[] biases, SymInt num_rows, "
    "Tensor(a!)? counts, int first=0) -> Tensor",
    "weigh_experts": "(Tensor x, Tensor weights) -> Tensor",
    "causal_conv": "(Tensor x, Tensor weight, Tensor? bias, " + _STATES + ", Tensor(b!) out, bool has_silu) -> ()",
    "gated_delta_rule": "(Tensor query, Tensor key, Tensor value, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, "
    + _STATES
    + ", Tensor(b!) out) -> ()",
    "ssd_scan": "(Tensor x, Tensor dt, Tensor dt_bias, Tensor a_log, Tensor b, Tensor c, Tensor d, "
    + _STATES
    + ", Tensor(b!) out, float least_dt, float most_dt) -> ()",
    "add_adapters": "(Tensor(a!) y, Tensor x, Tensor slots, Tensor ranks, Tensor a, Tensor b, int[] parts, "
    "int most_rank) -> ()",
    "rotary_embedding": "(Tensor positions, Tensor(a!) query, Tensor(b!) key, Tensor cos_sin_cache, "
    "bool is_interleaved=False) -> ()",
    "join": "(Tensor[] tensors) -> Tensor",
    "best_tokens": "(Tensor logits, Tensor? rows=None) -> (Tensor, Tensor)",
    "choose_tokens": "(Tensor logits, Tensor? rows, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor uniform) -> (Tensor, Tensor)",
    "gather_logits": "(Tensor logits, Tensor rows, Tensor(a!) out) -> ()",
    "apply_bitmask": "(Tensor(a!) logits, Tensor rows, Tensor mask) -> ()",
    "penalise": "(Tensor(a!) logits, Tensor tokens, Tensor rows, Tensor num_prompt, Tensor lengths, Tensor repetition, "
    "Tensor frequency, Tensor presence) -> ()",
    "token_logprobs": "(Tensor logits, Tensor? rows, Tensor tokens, int most) -> (Tensor, Tensor, Tensor, Tensor)",
}

_library = torch.library.Library("quire", "DEF")


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _column(logits: Tensor, rows: Tensor | None, dtype: torch.dtype, *width: int) -> Tensor:
    """An entry, or so many, for each row of logits that is meant."""
    return logits.new_empty((len(logits) if rows is None else len(rows), *width), dtype=dtype)


def _tokens(logits: Tensor, rows: Tensor | None = None, *_: Tensor) -> tuple[Tensor, Tensor]:
    return _column(logits, rows, torch.int64), _column(logits, rows, torch.float32)


def _logprobs(logits: Tensor, rows: Tensor | None, tokens: Tensor, most: int) -> tuple[Tensor, ...]:
    ids, values = _column(logits, rows, torch.int64, most), _column(logits, rows, torch.float32, most)
    return _column(logits, rows, torch.float32), _column(logits, rows, torch.int64), ids, values


# What torch.compile needs to know: shapes and dtypes of results. Operators that write into their arguments have none.
# Last arguments that have their defaults are not there.
_SHAPES: dict[str, Callable[..., Any]] = {
    "attention_part": lambda query, *others: query.new_empty((*query.shape[:2], others[11] + 1), dtype=torch.float32),
    "rms_norm": lambda x, weight, eps: _contiguous_like(x),
    "add_rms_norm": lambda x, residual, weight, eps: (_contiguous_like(x), _contiguous_like(x)),
    "gated_rms_norm": lambda x, gate, weight, eps, gates_first: _contiguous_like(x),
    "silu_and_mul": lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    "clamped_swiglu": lambda x, alpha, limit: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    "add": lambda x, y: _contiguous_like(x),
    "multiply": lambda x, y: _contiguous_like(x),
    "convert": lambda x, dtype: torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format),
    "scale": lambda x, *_: _contiguous_like(x),
    "activate": lambda x, kind: _contiguous_like(x),
    "layer_norm": lambda x, weight, bias, eps: _contiguous_like(x),
    "packed_linear": lambda x, packed, bias, num_rows: x.new_empty((*x.shape[:-1], num_rows)),
    "sliced_linear": lambda x, packed, bias, num_rows, num_slices, dtype: x.new_empty(
        (*x.shape[:-1], num_rows), dtype=dtype
    ),
    "all_reduce": lambda x, bias, meeting, rank, size, dtype: torch.empty_like(x, dtype=dtype),
    "all_gather": lambda x, meeting, rank, size, total: x.new_empty((*x.shape[:-1], total)),
    "packed_rows": lambda packed, ids, dtype, num_columns, *_: ids.new_empty((ids.shape[0], num_columns), dtype=dtype),
    "route_tokens": lambda logits, bias, top_k, *_: (
        logits.new_empty((logits.shape[0], top_k), dtype=torch.float32),
        logits.new_empty((logits.shape[0], top_k), dtype=torch.int32),
    ),
    "grouped_linear": lambda x, ids, packed, biases, num_rows, *_: x.new_empty(
        (*(x.shape[:2] if ids is None else ids.shape), num_rows)
    ),
    "join": lambda tensors: tensors[0].new_empty((*tensors[0].shape[:-1], sum(x.shape[-1] for x in tensors))),
    "weigh_experts": lambda x, weights: x.new_empty((x.shape[0], x.shape[2])),
    "look_up": lambda table, ids, *_: table.new_empty((ids.shape[0], table.shape[1])),
    "new_rows": lambda like, sizes: like.new_empty(sizes),
    "best_tokens": _tokens,
    "choose_tokens": _tokens,
    "token_logprobs": _logprobs,
}


def _dispatch_key(arguments: tuple[Any, ...]) -> str:
    """That of the home which may serve these tensors. Blocks that move between a device and the host are the one case
    in which they lie in different places."""
    flat = [item for argument in arguments for item in (argument if isinstance(argument, list) else [argument])]
    tensors = [item for item in flat if isinstance(item, Tensor)]
    if all(tensor.is_cpu for tensor in tensors):
        return "CPU"
    return "CUDA" if any(tensor.is_cuda for tensor in tensors) else ""


def _first_call(name: str) -> Callable[..., Any]:
    """The implementation for every device that has no kernel of its own (yet)."""
    specification = getattr(reference, name)

    def run(*arguments: Any) -> Any:
        key = _dispatch_key(arguments)
        if _has_faster_home(key) and torch._C._dispatch_has_kernel_for_dispatch_key(f"quire::{name}", key):
            return globals()[name](*arguments)
        return specification(*arguments)

    return run


def _has_faster_home(key: str) -> bool:
    # Imported here: building and loading is nothing that `import quire.worker.kernels` should pay for.
    from quire.worker.kernels import cpu, triton

    return bool(key) and ((key == "CPU" and cpu.load()) or triton.load(key))


def register(name: str, function: Callable[..., Any], key: str) -> None:
    """Give an operator a home for tensors with this dispatch key of torch."""
    _library.impl(name, function, key)


def _register() -> None:
    for name, schema in _SCHEMAS.items():
        _library.define(name + schema)
        _library.impl(name, _first_call(name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"quire::{name}", _SHAPES.get(name, lambda *_: None), lib=_library)


def _bound(specification: _Function) -> _Function:
    """The operator that is specified so."""
    return cast(_Function, getattr(torch.ops.quire, specification.__name__).default)


_register()

# Bound once: looking an operator up costs more than calling it. What takes its arguments in order is called as it is;
# other files of this folder have functions with names around the rest.
write_kv = _bound(reference.write_kv)
prepare_heads = _bound(reference.prepare_heads)
paged_attention = _bound(reference.paged_attention)
attention_part = _bound(reference.attention_part)
merge_attention = _bound(reference.merge_attention)
copy_blocks = _bound(reference.copy_blocks)
move_blocks = _bound(reference.move_blocks)
rms_norm = _bound(reference.rms_norm)
add_rms_norm = _bound(reference.add_rms_norm)
gated_rms_norm = _bound(reference.gated_rms_norm)
silu_and_mul = _bound(reference.silu_and_mul)
clamped_swiglu = _bound(reference.clamped_swiglu)
rotary_embedding = _bound(reference.rotary_embedding)
pack_weight = _bound(reference.pack_weight)
pack_quantized = _bound(reference.pack_quantized)
unpack_weight = _bound(reference.unpack_weight)
packed_linear = _bound(reference.packed_linear)
sliced_linear = _bound(reference.sliced_linear)
all_reduce = _bound(reference.all_reduce)
all_gather = _bound(reference.all_gather)
send = _bound(reference.send)
receive = _bound(reference.receive)
packed_rows = _bound(reference.packed_rows)
route_tokens = _bound(reference.route_tokens)
grouped_linear = _bound(reference.grouped_linear)
weigh_experts = _bound(reference.weigh_experts)
causal_conv = _bound(reference.causal_conv)
gated_delta_rule = _bound(reference.gated_delta_rule)
ssd_scan = _bound(reference.ssd_scan)
add_adapters = _bound(reference.add_adapters)
add = _bound(reference.add)
multiply = _bound(reference.multiply)
convert = _bound(reference.convert)
scale = _bound(reference.scale)
activate = _bound(reference.activate)
layer_norm = _bound(reference.layer_norm)
look_up = _bound(reference.look_up)
join = _bound(reference.join)
new_rows = _bound(reference.new_rows)
best_tokens = _bound(reference.best_tokens)
choose_tokens = _bound(reference.choose_tokens)
gather_logits = _bound(reference.gather_logits)
apply_bitmask = _bound(reference.apply_bitmask)
penalise = _bound(reference.penalise)
token_logprobs = _bound(reference.token_logprobs)
