"""The Triton home of the kernels: GPUs, and any machine through Triton's interpreter.

A file is one operation, and its function has the signature of its specification in `reference/`. `TWINS` names the file
of each operator; `REASONS` says of every other operator why it has none here. Nothing of Triton is imported before
`load` is called for a device that uses it.

`EXAMPLES` at the end of a file are calls of its function as models make them, on tensors without memory. From them
`ahead_of_time` in tests compiles exactly what would be launched, and `page` says what it would take.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from quire.errors import OptionError

_logger = logging.getLogger("quire")
_lock = threading.Lock()
# Whether the twins serve a dispatch key of torch, as far as that was decided.
_is_loaded: dict[str, bool] = {}
_reason = "no GPU was used yet"

# The file in which an operator's twin is.
TWINS = {
    "add_adapters": "add_adapters",
    "add_rms_norm": "rms_norm",
    "apply_bitmask": "apply_bitmask",
    "attention_part": "paged_attention",
    "best_tokens": "best_tokens",
    "causal_conv": "causal_conv",
    "choose_tokens": "choose_tokens",
    "clamped_swiglu": "gates",
    "copy_blocks": "copy_blocks",
    "gated_delta_rule": "gated_delta_rule",
    "gated_rms_norm": "gated_rms_norm",
    "gather_logits": "gather_logits",
    "grouped_linear": "grouped_linear",
    "layer_norm": "layer_norm",
    "merge_attention": "paged_attention",
    "move_blocks": "copy_blocks",
    "pack_quantized": "packed_linear",
    "pack_weight": "packed_linear",
    "packed_linear": "packed_linear",
    "packed_rows": "packed_linear",
    "paged_attention": "paged_attention",
    "penalise": "penalise",
    "prepare_heads": "prepare_heads",
    "rms_norm": "rms_norm",
    "rotary_embedding": "rotary_embedding",
    "route_tokens": "route_tokens",
    "silu_and_mul": "gates",
    "ssd_scan": "ssd_scan",
    "token_logprobs": "token_logprobs",
    "unpack_weight": "packed_linear",
    "weigh_experts": "weigh_experts",
    "write_kv": "write_kv",
}
# Kernels that are no operator's twin: the worker calls them.
FURTHER = ("prepare_blocks",)

_RANKS = "ranks on GPUs are not built yet"
_ONE = "one kernel of PyTorch, as fast as memory"
REASONS = {
    "activate": _ONE,
    "add": _ONE,
    "all_gather": _RANKS,
    "all_reduce": _RANKS,
    "convert": _ONE,
    "join": _ONE,
    "look_up": _ONE,
    "multiply": _ONE,
    "new_rows": "allocates memory and computes nothing",
    "receive": _RANKS,
    "scale": "a few kernels of PyTorch; few models have it",
    "send": _RANKS,
    "sliced_linear": _RANKS,
}


def twin(name: str) -> Callable[..., Any]:
    """The Triton function of an operator; imports Triton."""
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{TWINS[name]}"), name)
    return function


def load(dispatch_key: str) -> bool:
    """True if the twins run from now on for tensors with this key, `CUDA` (which ROCm has as well) or `CPU`.

    QUIRE_GPU_KERNELS: `auto` (default) falls back to the reference and says why in the log, `triton` raises instead,
    `reference` never imports Triton. On a CPU the interpreter runs them if QUIRE_CPU_KERNELS is `triton`.
    """
    with _lock:
        if dispatch_key not in _is_loaded:
            _is_loaded[dispatch_key] = _decide(dispatch_key)
        return _is_loaded[dispatch_key]


def serves(device: torch.device) -> bool:
    """Whether the twins compute for tensors of this device."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    return key is not None and load(key)


def has_fixed_order() -> bool:
    """Whether products of floats are formed in an order that does not depend on the batch, by Quire's kernel:
    QUIRE_GPU_PRODUCTS is `auto` (default: torch's own, which are faster) or `fixed`."""
    choice = os.environ.get("QUIRE_GPU_PRODUCTS", "auto")
    if choice not in ("auto", "fixed"):
        raise OptionError(f"QUIRE_GPU_PRODUCTS={choice}: must be auto or fixed.")
    return choice == "fixed"


def _decide(dispatch_key: str) -> bool:
    global _reason
    if dispatch_key == "CPU":
        if os.environ.get("QUIRE_CPU_KERNELS") != "triton":
            return False
        from quire.worker.kernels.triton.interpreter import interpret

        interpret()
        _register(dispatch_key)
        return True
    choice = os.environ.get("QUIRE_GPU_KERNELS", "auto")
    if choice not in ("auto", "triton", "reference"):
        raise OptionError(f"QUIRE_GPU_KERNELS={choice}: must be auto, triton or reference.")
    if choice == "reference":
        _reason = "QUIRE_GPU_KERNELS=reference"
        return False
    try:
        _register(dispatch_key)
    except ImportError as error:
        if choice == "triton":
            raise
        _reason = str(error)
        _logger.warning("GPU kernels: plain PyTorch, many times slower, because: %s", error)
        return False
    return True


def _register(dispatch_key: str) -> None:
    from quire.worker.kernels import operators

    functions = {name: twin(name) for name in TWINS}
    for name, function in functions.items():
        operators.register(name, function, dispatch_key)


def statistics() -> dict[str, str]:
    """Which kernels run on GPUs, and why."""
    if any(_is_loaded.values()):
        return {"kernels": "triton", "devices": ", ".join(sorted(key for key, is_on in _is_loaded.items() if is_on))}
    return {"kernels": "reference", "reason": _reason}
