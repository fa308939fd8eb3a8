"""Counts the bytes of tensors that live at once while a piece of work runs.

On a CPU the process's own high-water mark says little about a small piece of work: the allocator hands out again what
was freed before, and moves in steps. Counting tensors is exact and repeatable, so a small step can be scaled up. What
operators allocate inside of themselves is not seen.

Calls are seen where Python makes them. Torch's dispatch modes would see more, and import its compiler, which takes
seconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class LiveTensors(TorchFunctionMode):
    """A context; `peak_bytes` is the most that lived at once among what was made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._bytes = 0
        self._known: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._count(storage, inputs)
        return result

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        address = storage._cdata
        if address in self._known or address in inputs:  # a view, or written in place
            return
        self._known.add(address)
        self._bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(storage, self._forget, address, storage.nbytes())

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self._bytes -= num_bytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    """Those of all tensors in there, but for packed weights, which have none."""
    return [tensor.untyped_storage() for tensor in _tensors(tree) if tensor.layout == torch.strided]


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))
