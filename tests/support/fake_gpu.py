"""A GPU that is not there: a worker runs on it step by step, and learns from it what a real one would have cost.

All tensors of the device are fake: they have a shape, a type and the device `cuda:0`, and no numbers. Whatever would
have to know a number raises (`.item()`, `.tolist()`, a mask as an index, `nonzero`), and so does what would wait for
the device in secret: a copy to the host but for the one that a step ends with, and a copy from memory of the host that
is not pinned. Operators run the host's half of their Triton twins; what these would launch is checked to be given
tensors of the device alone, and not launched.

What the device answers is zeros, so every token is token 0.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from quire.config.process_memory import MemoryReport
from quire.worker import arrival, checkpoint_files, model_loader, platforms, staging, state_cache, weight_loading
from quire.worker.attention import layer as attention_layer
from quire.worker.kernels import reference, triton
from quire.worker.live_tensors import LiveTensors
from quire.worker.platforms.platform import dtype_by_name

DEVICE = torch.device("cuda", 0)
_BYTES = 80 << 30
# numbers of devices in torch's registries
_CUDA, _META = 1, 14
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_")


class HostWaitError(Exception):
    """The host would have waited for the device, or given it what it cannot read."""


class FakeGpu:
    """The platform."""

    name = "cuda"
    device = DEVICE
    # made there, code would have nothing to run on
    gains_from_compiling = False
    supported_dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def dtype(self, name: str) -> torch.dtype:
        return dtype_by_name(name, self.supported_dtypes, "a GPU that is not there")

    def memory(self) -> MemoryReport:
        return MemoryReport(_BYTES, _BYTES, "the GPU's memory")

    def measure_peak(self) -> LiveTensors:
        return LiveTensors()

    def set_threads(self, num_threads: int, processors: Sequence[int] | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def is_beyond_repair(self, error: BaseException) -> bool:
        return False

    def graph_device(self) -> None:
        return None

    def copy_lane(self) -> None:
        return None

    def release_memory(self) -> None:
        pass


class Passed:
    """A mark on a device that has done everything."""

    def is_passed(self) -> bool:
        return True


class FakeDeviceWork(TorchDispatchMode):
    """Runs operators of Quire by the host's half of their twins, and refuses what waits."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: dict[int, Tensor] = {}
        self.num_operators = 0
        self.num_launches = 0
        # by kernel, constants and options of the compiler: what it was compiled for besides
        self.specialised: dict[Any, set[Any]] = {}
        # once the model is loaded and what is kept for good is there
        self.is_strict = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func.namespace == "quire":
            self.num_operators += 1
            with self:
                return _host_half(func._schema.name.partition("::")[2])(*args, **keywords)
        if func._schema.name == "aten::to":  # torch leaves it whole in inference mode, and its parts are looked at
            with self:
                return func.decompose(*args, **keywords)
        if not self.is_strict and func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # loading asks whether weights are finite
        if self.is_strict and func in _COPIES:
            self._check_copy(func, args, keywords)
        if self.is_strict and func._schema.name in _INDEXED:
            _check_index(args)
        return func(*args, **keywords)

    def _check_copy(self, func: Any, args: Any, keywords: Any) -> None:
        if func is _aten.copy_.default:
            source, target = args[1], args[0].device
        else:
            source, target = args[0], keywords.get("device") or args[0].device
        if source.device.type == "cuda" and torch.device(target).type == "cpu":
            raise HostWaitError("a copy to the host in the middle of a step")
        if source.device.type == "cpu" and torch.device(target).type == "cuda" and not self.is_pinned(source):
            raise HostWaitError(f"a copy of {tuple(source.shape)} from memory that is not pinned waits for the device")

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def pin(self, tensor: Tensor) -> Tensor:
        # kept, so that no other memory gets its address
        self._pinned[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def check_launch(self, launched: Any) -> None:
        """In the place of a launch."""
        self.num_launches += 1
        constants, besides = _compiled_for(launched)
        self.specialised.setdefault(constants, set()).add(besides)
        for name, value in launched.arguments.items():
            if isinstance(value, Tensor) and value.device.type != "cuda" and not self.is_pinned(value):
                raise HostWaitError(f"{launched.kernel.__name__} is given {name} on {value.device}")


def _check_index(args: Any) -> None:
    """torch takes places in memory of the host as well, and sends them without a word."""
    target, places, *_ = args
    if target.device.type == "cuda":
        for place in places:
            if place is not None and place.device.type == "cpu":
                raise HostWaitError(f"{tuple(place.shape)} places in memory of the host index a tensor of the device")


def _compiled_for(launched: Any) -> tuple[Any, Any]:
    """What Triton makes a kernel of its own for: constants and types, and of other arguments whether they are 1, and
    multiples of 16, and how wide they are."""
    kernel = launched.kernel
    plain = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()
    constants = []
    besides = []
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        value = launched.arguments[name]
        if "constexpr" in str(parameter.annotation):
            constants.append((name, str(value)))
        elif isinstance(value, Tensor):
            # memory begins at multiples of 256 bytes
            is_aligned = name in plain or value.storage_offset() * value.element_size() % 16 == 0
            constants.append((name, value.dtype))
            besides.append((name, is_aligned))
        elif isinstance(value, int):
            size = "long" if abs(value) >= 1 << 31 else "int"
            besides.append((name, size if name in plain else (size, value == 1, value % 16 == 0)))
    options = tuple(sorted(launched.options.items()))
    return (kernel.__name__, tuple(constants), options), tuple(besides)


def _allow_indexing() -> None:
    """torch makes its device current before it indexes, and a build without CUDA has no way to: it gets that of
    tensors without memory, which does nothing. (`FakeTensorMode` itself does so in builds with CUDA.)"""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[_CUDA] is None:
        guards[_CUDA] = guards[_META]


def _remember_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed weight begins with numbers that say what it is, which a device is asked for once, at a first call. When
    codes are packed it is asked whether scales and zeros have a shorter form: here they have."""
    from quire.worker.kernels.triton import weight_layout

    pack = weight_layout._packed
    by_length: dict[int, Any] = {}

    def pack_and_note(header: Any, values: Tensor, *others: Tensor) -> Tensor:
        packed = pack(header, values, *others)
        by_length[len(packed)] = header
        return packed

    monkeypatch.setattr(weight_layout, "_packed", pack_and_note)
    monkeypatch.setattr(weight_layout, "read_header", lambda packed: by_length[len(packed)])
    monkeypatch.setattr(weight_layout, "_fits_half", lambda scales: True)
    monkeypatch.setattr(weight_layout, "_one_zero", lambda scales, offsets: 8)


_from_numpy = torch.from_numpy
_tolist = Tensor.tolist


def _of_the_host(array: Any) -> Tensor:
    """With its numbers: the host knows its own memory."""
    with _disable_current_modes():
        return _from_numpy(array)


class _OpenFile:
    """A checkpoint's, whose tensors have their numbers: the host reads them."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self._file: Any = safe_open(*args, **keywords)

    def __enter__(self) -> _OpenFile:
        self._opened = self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> Any:
        return self._opened.keys()

    def get_tensor(self, name: str) -> Tensor:
        with _disable_current_modes():
            tensor: Tensor = self._opened.get_tensor(name)
            return tensor


def _numbers_of_the_host(tensor: Tensor) -> Any:
    if isinstance(tensor, FakeTensor):
        raise HostWaitError(f"the numbers of {tuple(tensor.shape)} on {tensor.device} are asked for")
    with _disable_current_modes():
        return _tolist(tensor)


def _host_half(name: str) -> Any:
    if name == "attention":
        return attention_layer._attention
    if name == "recurrent":
        return state_cache._recurrent
    return triton.twin(name) if name in triton.TWINS else getattr(reference, name)


class FakeDevice:
    """What happened on it."""

    def __init__(self, work: FakeDeviceWork) -> None:
        self.work = work
        self.num_waits = 0

    def read(self, flat: Tensor) -> Any:
        """In the place of the one copy to the host: zeros."""
        self.num_waits += 1
        return np.zeros(flat.numel(), dtype=np.float64)


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """Workers for the device `cuda` that are made inside run on one that is not there."""
    from quire.worker.kernels.triton import launch

    _allow_indexing()
    work = FakeDeviceWork()
    device = FakeDevice(work)
    monkeypatch.setitem(platforms.PLATFORMS, "cuda", FakeGpu)
    monkeypatch.setitem(triton._is_loaded, "CUDA", True)
    monkeypatch.setattr(arrival, "CudaMark", Passed)
    monkeypatch.setattr(launch, "run", work.check_launch)
    monkeypatch.setattr(model_loader, "fill_randomly", lambda name, parameter, seed=0: None)
    monkeypatch.setattr(weight_loading, "check_finite", lambda *arguments: None)
    monkeypatch.setattr(staging, "read", device.read)
    monkeypatch.setattr(checkpoint_files, "safe_open", _OpenFile)
    _remember_headers(monkeypatch)
    monkeypatch.setattr(torch, "from_numpy", _of_the_host)
    monkeypatch.setattr(Tensor, "tolist", _numbers_of_the_host)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: work.pin(tensor))
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: work.is_pinned(tensor))
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata)
    with FakeTensorMode(allow_non_fake_inputs=True), work:
        yield device
