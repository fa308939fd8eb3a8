"""The torch operators of the namespace `quire`: schemas, shapes for tracing, and the home of last resort.

Every operator is defined once, here. The C++ library registers itself for tensors on the CPU when it is loaded; what
has no faster home runs `reference/`. The library is loaded (and built, if need be) by the first call on the CPU: that
call lands in `_first_call` below, later ones go from the dispatcher straight into C++.

`Library.define` and `impl` are used on purpose: a call costs 1 to 2 us, a call of `torch.library.custom_op` 8 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.worker.kernels import reference

_SCHEMAS = {
    "write_kv": "(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()",
    "paged_attention": "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor query_starts, Tensor(a!) out, Tensor? sinks, float scale, int sliding_window, float soft_cap) -> ()",
    "copy_blocks": "(Tensor(a!)[] caches, Tensor pairs) -> ()",
    "move_blocks": "(Tensor[] sources, Tensor(a!)[] destinations, Tensor pairs) -> ()",
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    "silu_and_mul": "(Tensor x) -> Tensor",
    "rotary_embedding": "(Tensor positions, Tensor(a!) query, Tensor(b!) key, Tensor cos_sin_cache) -> ()",
}

_library = torch.library.Library("quire", "DEF")


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# What torch.compile needs to know: shapes and dtypes of results. Operators that write into their arguments have none.
_SHAPES: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, eps: _contiguous_like(x),
    "add_rms_norm": lambda x, residual, weight, eps: (_contiguous_like(x), _contiguous_like(x)),
    "silu_and_mul": lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
}


def _is_all_on_cpu(arguments: tuple[Any, ...]) -> bool:
    """Blocks that move between a device and the host are the one case in which tensors lie in different places."""
    flat = [item for argument in arguments for item in (argument if isinstance(argument, list) else [argument])]
    return all(item.is_cpu for item in flat if isinstance(item, Tensor))


def _first_call(name: str) -> Callable[..., Any]:
    """The implementation for every device that has no kernel of its own (yet)."""
    specification = getattr(reference, name)

    def run(*arguments: Any) -> Any:
        if _is_all_on_cpu(arguments):
            # Imported here: building and loading is nothing that `import quire.worker.kernels` should pay for.
            from quire.worker.kernels import cpu

            if cpu.load():
                return globals()[name](*arguments)
        return specification(*arguments)

    return run


def _register() -> None:
    for name, schema in _SCHEMAS.items():
        _library.define(name + schema)
        _library.impl(name, _first_call(name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"quire::{name}", _SHAPES.get(name, lambda *_: None), lib=_library)


_register()

# Bound once: looking an operator up costs more than calling it.
write_kv = torch.ops.quire.write_kv.default
paged_attention = torch.ops.quire.paged_attention.default
copy_blocks = torch.ops.quire.copy_blocks.default
move_blocks = torch.ops.quire.move_blocks.default
rms_norm = torch.ops.quire.rms_norm.default
add_rms_norm = torch.ops.quire.add_rms_norm.default
silu_and_mul = torch.ops.quire.silu_and_mul.default
rotary_embedding = torch.ops.quire.rotary_embedding.default
