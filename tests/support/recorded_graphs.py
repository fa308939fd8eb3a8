"""Stands in for a device that captures graphs: it records operators with the memory that they were given, and replays
them on the same memory.

As a real graph it knows no host. What is done in Python while it records happens once; a replay sees the numbers that
the same memory holds then, and nothing else. It refuses what a real capture could not hold: numbers that come to the
host, and memory that comes from there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.worker import state_cache
from quire.worker.attention import layer as attention_layer

# what is the host's half of an operator: what it calls is recorded instead
_OPENED: dict[Any, Callable[..., Any]] = {
    torch.ops.quire.attention.default: attention_layer._attention,
    torch.ops.quire.recurrent.default: state_cache._recurrent,
}
_TO_HOST = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__, Tensor.nonzero, Tensor.unique,
}  # fmt: skip
_SHAPES_OF_NUMBERS = {"aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select", "aten::_unique2"}


class HostWorkError(Exception):
    """A captured region holds an operation of the host."""


class _NoHost(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_HOST:
            raise HostWorkError(f"{func.__name__} brings numbers to the host")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, memory: Iterable[Tensor]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        # that were made, none of which is given back
        self.num_bytes = 0
        self._known = {_address(tensor) for tensor in memory}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **keywords)
        is_masked = func._schema.name == "aten::index" and any(
            tensor is not None and tensor.dtype == torch.bool for tensor in args[1]
        )
        if is_masked or func._schema.name in _SHAPES_OF_NUMBERS:
            raise HostWorkError(f"{func} needs a number to know its shape")
        for tensor in _tensors((args, keywords)):
            if tensor.numel() and _address(tensor) not in self._known:
                raise HostWorkError(f"{func} is given {tuple(tensor.shape)} that came from the host")
        with torch._C.DisableTorchFunction():
            result = func(*args, **keywords)
        for tensor in _tensors(result):
            if _address(tensor) not in self._known:
                self._known.add(_address(tensor))
                self.num_bytes += tensor.untyped_storage().nbytes()
        self.calls.append((func, args, keywords, result))
        return result


class RecordedGraph:
    def __init__(self, calls: list[tuple[Any, Any, Any, Any]], outputs: Any, num_bytes: int) -> None:
        self.calls = calls
        self.outputs = outputs
        self.num_bytes = num_bytes
        self._places = self._addresses()
        self.num_replays = 0

    @torch.inference_mode()
    def replay(self) -> None:
        assert self._addresses() == self._places, "memory that a graph was captured with has moved"
        self.num_replays += 1
        for func, args, keywords, result in self.calls:
            again = func(*args, **keywords)
            # a view of what is there needs no copy
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if _address(old) != _address(new):
                    old.copy_(new)

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for call in self.calls for tensor in _tensors(call[1:])]


def every_tensor() -> list[Tensor]:
    """That this process holds."""
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    # others, which tests before and compilers may have made, have no memory
    return [one for one in found if one.layout is torch.strided and not isinstance(one, FakeTensor)]


class RecordedGraphs:
    """`memory()`: all that is there before a capture, and stays where it is."""

    def __init__(self, memory: Callable[[], Iterable[Tensor]] = every_tensor) -> None:
        self._memory = memory
        self.graphs: list[RecordedGraph] = []
        self._pool_bytes = 0

    def capture(self, run: Callable[[], Any]) -> RecordedGraph:
        run()
        recorder = _Recorder(self._memory())
        with _NoHost(), recorder:
            outputs = run()
        # in one pool: as much as the largest
        num_bytes = max(0, recorder.num_bytes - self._pool_bytes)
        self._pool_bytes += num_bytes
        self.graphs.append(RecordedGraph(recorder.calls, outputs, num_bytes))
        return self.graphs[-1]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
