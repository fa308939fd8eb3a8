"""Attention backends by name, and the choice of one for a model.

A backend from outside the tree comes through the entry point group `quire.attention_backends`: a name, and a class
without constructor arguments that follows `AttentionBackend`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import cast

from torch import nn

from quire.errors import ModelError, OptionError, suggestion
from quire.worker.attention.backend import AttentionBackend, AttentionSpec
from quire.worker.attention.layer import Attention, attention_layers, encoding_layers
from quire.worker.kernels.cache_format import DTYPE_BY_NAME

ENTRY_POINT_GROUP = "quire.attention_backends"

# In the order in which "auto" tries them. Imported when asked, because a backend may load a compiler.
_BUILT_IN = {
    "cpu": "quire.worker.attention.cpu:CpuBackend",
    "triton": "quire.worker.attention.triton:TritonBackend",
    "reference": "quire.worker.attention.reference:ReferenceBackend",
}


def backend_names() -> list[str]:
    """Backends of the tree in their order, then those of other packages."""
    others = sorted(point.name for point in entry_points(group=ENTRY_POINT_GROUP))
    return [*_BUILT_IN, *(name for name in others if name not in _BUILT_IN)]


def make_backend(name: str) -> AttentionBackend:
    """The backend of this name."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return cast(AttentionBackend, getattr(importlib.import_module(module), attribute)())
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return cast(AttentionBackend, point.load()())
    names = backend_names()
    raise OptionError(
        f"attention_backend={name!r}: must be auto or one of {', '.join(names)}." + suggestion(name, names)
    )


def bind_backend(
    model: nn.Module, name: str, block_size: int, device_type: str, kv_cache_dtype: str | None = None
) -> AttentionBackend:
    """Give every attention layer the same backend, so that the metadata of a group fits each of its layers.

    Keys and values are kept in the type of that name, or in the model's own.
    """
    cached = attention_layers(model).values()
    layers: list[Attention] = [*cached, *encoding_layers(model)]
    for layer in cached:
        layer.cache_dtype = DTYPE_BY_NAME[kv_cache_dtype] if kv_cache_dtype else layer.dtype
    specs = {layer.attention_spec(block_size, device_type) for layer in layers}
    reasons: list[str] = []
    for candidate in backend_names() if name == "auto" else [name]:
        backend = make_backend(candidate)
        refused = [reason for spec in specs if (reason := _refusal(backend, spec)) is not None]
        if refused:
            reasons.append(f"{candidate}: {refused[0]}")
            continue
        for layer in layers:
            layer.backend = backend
        return backend
    raise ModelError(
        f"attention_backend={name}: no backend can serve this model ({'; '.join(reasons)}). "
        "Leave attention_backend at auto, or change what the reason names."
    )


def _refusal(backend: AttentionBackend, spec: AttentionSpec) -> str | None:
    if spec.cache_dtype != spec.dtype and spec.cache_dtype not in getattr(backend, "cache_dtypes", ()):
        return f"it keeps keys and values in the model's type alone ({spec.dtype}), not as {spec.cache_dtype}"
    if not spec.is_causal and not getattr(backend, "takes_not_causal", False):
        return "it computes causal attention alone, and the tokens of this model see each other"
    if spec.is_crossing and not hasattr(backend, "store"):
        return "it cannot keep keys of what an encoder made, which this model looks at"
    return backend.supports(spec)
