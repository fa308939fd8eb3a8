"""A plugin of pytest that sends every operator of the kernels to a driver (driver.cpp), which runs a library for
another processor. So the suites in tests/worker/kernels are run on it as they are:

    QUIRE_REMOTE_KERNELS="qemu-aarch64 -L /usr/aarch64-linux-gnu DRIVER LIBRARY" \\
        PYTHONPATH=src:. pytest -p tests.support.remote_kernels.plugin tests/worker/kernels/test_matmul.py

What a call needs goes there: the bytes of every tensor, whole storages with what lies between the rows. What it has
changed comes back, so a write where nothing may be written is seen as it is here.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

import pytest
import torch
from torch import Tensor

from quire.worker.kernels import cpu, operators
from quire.worker.kernels.cpu import build, library

# As torch numbers them.
_DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e4m3fn: 24,
}
_BY_NUMBER = {number: dtype for dtype, number in _DTYPES.items()}


class Message:
    """A call on its way: arguments, and the storages that they are views of, each once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arguments: list[bytes] = []
        self.storages: list[torch.UntypedStorage] = []

    def add(self, value: Any, is_optional: bool) -> None:
        self._arguments.append(self._optional(value) if is_optional else self._plain(value))

    def encoded(self, num_results: int) -> bytes:
        parts = [b"c", _text(self._name), struct.pack("<I", len(self.storages))]
        for storage in self.storages:
            parts += [struct.pack("<Q", storage.nbytes()), ctypes.string_at(storage.data_ptr(), storage.nbytes())]
        parts += [struct.pack("<I", len(self._arguments)), *self._arguments, struct.pack("<I", num_results)]
        return b"".join(parts)

    def _optional(self, value: Any) -> bytes:
        return b"?\0" if value is None else b"?\1" + self._plain(value)

    def _plain(self, value: Any) -> bytes:
        match value:
            case Tensor():
                return b"t" + self._tensor(value)
            case list() | tuple():
                return b"l" + struct.pack("<I", len(value)) + b"".join(map(self._plain, value))
            case float():
                return b"i" + struct.pack("<d", value)
            case torch.dtype():
                return b"i" + struct.pack("<q", _DTYPES[value])
        return b"i" + struct.pack("<q", int(value))

    def _tensor(self, tensor: Tensor) -> bytes:
        storage = tensor.untyped_storage()
        known = [other.data_ptr() for other in self.storages]
        if storage.data_ptr() not in known or storage.nbytes() == 0:
            self.storages.append(storage)
            index = len(self.storages) - 1
        else:
            index = known.index(storage.data_ptr())
        offset = tensor.storage_offset() * tensor.element_size()
        dims = tensor.dim()
        head = struct.pack("<IQiI", index, offset, _DTYPES[tensor.dtype], dims)
        return head + struct.pack(f"<{2 * dims}q", *tensor.shape, *tensor.stride())


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()


class Driver:
    """The process that has the library."""

    def __init__(self, command: Sequence[str]) -> None:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        self._to: IO[bytes] = process.stdin
        self._from: IO[bytes] = process.stdout
        self._lock = threading.Lock()

    def call(self, message: Message, num_results: int) -> list[Tensor]:
        """Results; what has changed in the storages is there as well. Raises what the kernel raised."""
        with self._lock:
            self._send(message.encoded(num_results))
            if fault := self._text():
                raise RuntimeError(fault)
            for storage in message.storages:
                if self._take(1) != b"\0":
                    ctypes.memmove(storage.data_ptr(), self._take(storage.nbytes()), storage.nbytes())
            return [self._tensor() for _ in range(num_results)]

    def select_isa(self, name: str) -> bool:
        with self._lock:
            self._send(b"s" + _text(name))
            return self._number("<i") != 0

    def isa(self) -> str:
        with self._lock:
            self._send(b"n")
            return self._text()

    def set_crew(self, num_threads: int) -> None:
        with self._lock:
            self._send(b"h" + struct.pack("<i", num_threads))

    def _send(self, message: bytes) -> None:
        self._to.write(message)
        self._to.flush()

    def _take(self, count: int) -> bytes:
        taken = self._from.read(count)
        if len(taken) < count:
            raise EOFError("the driver has ended")
        return taken

    def _number(self, form: str) -> int:
        (number,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(number)

    def _text(self) -> str:
        return self._take(self._number("<I")).decode()

    def _tensor(self) -> Tensor:
        dtype = _BY_NUMBER[self._number("<i")]
        dims = self._number("<I")
        sizes = struct.unpack(f"<{dims}q", self._take(8 * dims))
        result = torch.empty(sizes, dtype=dtype)
        bytes_of_it = result.numel() * result.element_size()
        ctypes.memmove(result.data_ptr(), self._take(bytes_of_it), bytes_of_it)
        return result


def _remote(driver: Driver, name: str) -> Callable[..., Any]:
    """The operator as torch calls it."""
    schema = getattr(torch.ops.quire, name).default._schema
    parameters = [(argument.type.kind() == "OptionalType", argument.default_value) for argument in schema.arguments]
    num_results = len(schema.returns)

    def run(*arguments: Any) -> Any:
        message = Message(name)
        given = [*arguments, *(default for _, default in parameters[len(arguments) :])]
        for value, (is_optional, _) in zip(given, parameters, strict=True):
            message.add(value, is_optional)
        results = driver.call(message, num_results)
        return tuple(results) if num_results > 1 else results[0] if results else None

    return run


def _no_library() -> ctypes.CDLL:
    pytest.skip("programs are recorded in the process that runs them")


def install(driver: Driver) -> None:
    """From now on these are the kernels of this process. Before any test is imported: they ask what is there."""
    build.HERE = build.ARM
    replacements: dict[str, Callable[..., Any]] = {
        "load": lambda: True,
        "loaded": _no_library,
        "select_isa": driver.select_isa,
        "set_crew": lambda num_threads, processors=None: driver.set_crew(num_threads),
        "statistics": lambda: {"kernels": "c++", "isa": driver.isa(), "path": "elsewhere"},
    }
    for name, function in replacements.items():
        setattr(cpu, name, function)
        setattr(library, name, function)
    for name in operators._SCHEMAS:
        operators.register(name, _remote(driver, name), "CPU")


install(Driver(shlex.split(os.environ["QUIRE_REMOTE_KERNELS"])))
