"""What a layer needs beyond its inputs, set once per step (4.2.2).

Owns: the metadata of attention, one entry a group, the states of recurrent layers, and the adapters' slots. Must never:
be nested, outlive its step, or be read by a model. Called by: the model runner around `model(...)`; read by
`attention/layer.py`, `state_cache.py`, `layers/adapters.py`, `layers/experts.py` and `compilation/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ForwardContext:
    """metadata[group] is what the group's attention backend made of this step's AttentionBatch."""

    metadata: tuple[Any, ...]
    # the states of recurrent layers (state_cache.py), if the model has any
    states: Any = None
    # True: measure time or memory of a step without any cache; attention returns zeros
    is_profiling: bool = False
    # of each token the slot of its adapter, int32, -1 for none; None: no token has one
    adapter_slots: Tensor | None = None
    # of each token whether it is nobody's, and stands there because work has one of a few sizes; None: none is
    is_padding_T: Tensor | None = None
    # the tokens whose hidden states are read, in rising order: those of others may have any content; None: all are
    wanted_n: Tensor | None = None
    # True: code is made of what the model calls, and nothing is computed
    is_traced: bool = False


_current: ContextVar[ForwardContext | None] = ContextVar("quire_forward_context", default=None)


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """The scope of one step."""
    if _current.get() is not None:
        raise RuntimeError("forward_context is set already: a step runs inside another step")
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def padding_of_step() -> Tensor | None:
    """`is_padding_T` of the step that runs now."""
    context = _current.get()
    return None if context is None else context.is_padding_T


def is_traced() -> bool:
    """Whether code is made of this call: plain PyTorch then, which a compiler fuses, in the place of small kernels."""
    if torch.compiler.is_compiling():
        # it cannot look at the context
        return True
    context = _current.get()
    return context is not None and context.is_traced


def profiling_context() -> ForwardContext:
    """A step that has no cache: everything of the model runs but attention itself."""
    return ForwardContext(metadata=(), is_profiling=True)


def current_forward_context() -> ForwardContext:
    """The context of the step that runs now."""
    context = _current.get()
    if context is None:
        raise RuntimeError("no forward_context is set: a model runs only inside `with forward_context(...)`")
    return context
