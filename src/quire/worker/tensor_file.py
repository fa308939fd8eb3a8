"""A safetensors file that somebody else may write meanwhile: read piece by piece, and never mapped.

A mapped file that becomes shorter ends the process that reads it, and with it everybody's requests: a training job
saves over its last version whenever it likes, and adapters come back whenever a request names them. Checkpoints are
mapped, because they are large and nobody writes them (checkpoint_files.py). Raises TensorFileError in words that
follow the file's name.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from quire.errors import one_line

MOST_HEADER_BYTES = 16 << 20
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPES = tuple(_DTYPES)


class TensorFileError(Exception):
    """What is wrong with the file."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a file, and FileNotFoundError for whatever else is there: a pipe may never have a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(errno.ENOENT, "is no file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


class TensorFile:
    """Of an open descriptor: names and shapes at once, tensors when they are asked for."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._began = _state_of(descriptor)
        length = int.from_bytes(self._read(0, _LENGTH_BYTES), "little")
        if length > MOST_HEADER_BYTES:
            raise TensorFileError(f"a header of {length:,} bytes, at most {MOST_HEADER_BYTES:,} are read")
        self._entries = _entries_in(self._read(_LENGTH_BYTES, length))
        self._start = _LENGTH_BYTES + length

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def dtype(self, name: str) -> str:
        """By the format's name."""
        return self._entries[name].dtype

    def shape(self, name: str) -> list[int]:
        return self._entries[name].shape

    def tensor(self, name: str) -> Tensor:
        """Of one of DTYPES, and whose shape the caller has found to be small enough."""
        entry = self._entries[name]
        dtype = _DTYPES[entry.dtype]
        first, end = entry.data_offsets
        if first < 0 or end - first != math.prod(entry.shape) * dtype.itemsize:
            raise TensorFileError("a tensor has another size than its shape says")
        data = self._read(self._start + first, end - first)
        return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)

    def check_unchanged(self) -> None:
        """What was read is one version."""
        if _state_of(self._descriptor) != self._began:
            raise TensorFileError("it was written while it was read")

    def _read(self, place: int, num_bytes: int) -> bytearray:
        if place + num_bytes > self._began[0]:
            raise TensorFileError("it ends too early")
        data = bytearray(num_bytes)
        left = memoryview(data)
        while left:
            count = os.preadv(self._descriptor, [left], place)
            if not count:
                raise TensorFileError("it became shorter while it was read")
            left = left[count:]
            place += count
        return data


def _state_of(descriptor: int) -> tuple[int, int]:
    state = os.fstat(descriptor)
    return state.st_size, state.st_mtime_ns


def _entries_in(header: bytearray) -> dict[str, _Entry]:
    try:
        entries: Any = msgspec.json.decode(header)
        if isinstance(entries, dict):
            entries.pop(_METADATA, None)
        return msgspec.convert(entries, dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TensorFileError(f"its header is not valid: {one_line(error)}") from error
