"""The Triton twins behind the functions that everybody calls, run by Triton's interpreter between guard zones."""

import os
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from quire.worker import arrival, kernels
from quire.worker.kernels import operators
from quire.worker.kernels import triton as home

GUARD_BYTES = 4096

# `benchmarks/gpu_check.py` names a device, which calls of kernels are then moved to. Else Triton interprets.
DEVICE = os.environ.get("QUIRE_KERNEL_DEVICE")
IS_INTERPRETED = DEVICE in (None, "cpu")
if IS_INTERPRETED:
    # Before anything imports Triton, which then decides that kernels are run and not compiled.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def triton_kernels(monkeypatch):
    """`quire.worker.kernels`, of which those functions that have a Triton twin call it."""
    if find_spec("triton") is None:
        pytest.skip('needs triton: pip install "quire[gpu-dev]"')
    if IS_INTERPRETED:
        from quire.worker.kernels.triton.interpreter import interpret

        interpret()
    from quire.worker.kernels.triton import launch

    for name in home.TWINS:
        twin = home.twin(name)
        called = twin if DEVICE is None else partial(call_on_device, twin, DEVICE, ON_HOST.get(name, 0))
        operator = getattr(operators, name)
        # some operators are called as they are, others by a function of the same name
        for module in (operators, kernels):
            if getattr(module, name, None) is operator:
                monkeypatch.setattr(module, name, called)
    if DEVICE is None:
        run = launch.run
        monkeypatch.setattr(launch, "run", lambda launched: run_between_guards(run, launched))
    if "ttsem" in sys.modules:
        # whose device is none: it pins nothing, and is never late
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(arrival, "CudaMark", partial(SimpleNamespace, is_passed=lambda: True))
        monkeypatch.setattr(launch, "_device", lambda number: launch.TARGETS["sm_90"])
    # new tensors are full of NaN
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=not IS_INTERPRETED)
    yield kernels
    torch.use_deterministic_algorithms(False)


# What an operator is given on the host, wherever the model is: so many arguments at the end.
ON_HOST = {"choose_tokens": 5, "copy_blocks": 1, "move_blocks": 1, "penalise": 7}


class GuardedCopies:
    """Copies of tensors' memory on a device, between bytes of 0xFF, which are NaN in every type."""

    def __init__(self, device):
        self.device = device
        # by the address of the memory: the memory itself, and its copy with the guards
        self.copies = {}
        # a cache that is given twice must be one tensor
        self.views = {}

    def of(self, value):
        """The same view of the copy of its memory; lists become lists of them, and what is no tensor stays."""
        if isinstance(value, list | tuple):
            return [self.of(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.views:
            # kept with the tensor: no other one gets its number meanwhile
            self.views[id(value)] = value, _moved(value, self._guarded(value.untyped_storage()))
        return self.views[id(value)][1]

    def _guarded(self, storage):
        if storage.data_ptr() not in self.copies:
            guarded = torch.full((storage.nbytes() + 2 * GUARD_BYTES,), 0xFF, dtype=torch.uint8, device=self.device)
            guarded[GUARD_BYTES : GUARD_BYTES + storage.nbytes()].copy_(_bytes_of(storage))
            self.copies[storage.data_ptr()] = storage, guarded
        return self.copies[storage.data_ptr()][1]

    def give_back(self):
        """What was written, and written beside nothing."""
        for storage, guarded in self.copies.values():
            end = GUARD_BYTES + storage.nbytes()
            assert (guarded[:GUARD_BYTES] == 0xFF).all(), "written before a tensor"
            assert (guarded[end:] == 0xFF).all(), "written behind a tensor"
            _bytes_of(storage).copy_(guarded[GUARD_BYTES:end])


def call_on_device(twin, device, num_on_host, *arguments, **options):
    """A call whose tensors are on the host, computed on the device."""
    copies = GuardedCopies(device)
    first_on_host = len(arguments) - num_on_host
    moved = [*copies.of(arguments[:first_on_host]), *arguments[first_on_host:]]
    result = twin(*moved, **{name: copies.of(value) for name, value in options.items()})
    copies.give_back()
    if isinstance(result, tuple):
        return tuple(tensor.cpu() for tensor in result)
    return result.cpu() if isinstance(result, Tensor) else result


def run_between_guards(run, launched):
    """A launch on copies of its tensors' memory."""
    copies = GuardedCopies("cpu")
    run(replace(launched, arguments={name: copies.of(value) for name, value in launched.arguments.items()}))
    copies.give_back()


def _bytes_of(storage):
    return torch.tensor([], dtype=torch.uint8).set_(storage)


def _moved(value, guarded):
    """The same view of the copy of its memory."""
    offset = value.storage_offset() + GUARD_BYTES // value.element_size()
    empty = torch.tensor([], dtype=value.dtype, device=guarded.device)
    return empty.set_(guarded.untyped_storage(), offset, value.shape, value.stride())
