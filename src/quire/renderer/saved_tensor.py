"""A tensor as torch.save writes it, read without running anything.

An archive that is not compressed holds a short pickled program, which says shape and type, and the numbers. The program
is not run: its few operations are followed here, and what a dense tensor does not need ends the reading. So nothing is
imported or called by name, nothing sparse is ever made, and no more memory is taken than the numbers themselves do.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# some 200 bytes for a tensor
_MOST_PROGRAM_BYTES = 4096
# entries of an archive: seven for a tensor; each has this mark in the directory, which is read as a whole
_MOST_ENTRIES = 64
_MOST_DIMENSIONS = 8
# numbers of a view that shows the same ones several times
_MOST_REPEATED = 1 << 14
_DIRECTORY_MARK = b"PK\x01\x02"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_NO_HOOKS = "collections OrderedDict"
_OF_STRANGE_PROGRAMS = (ValueError, TypeError, LookupError, OverflowError)
# by name of a storage: the type of what it holds; bfloat16 is the upper half of a float32
_BFLOAT16 = "<u2"
_TYPES = {
    "torch FloatStorage": "<f4",
    "torch DoubleStorage": "<f8",
    "torch HalfStorage": "<f2",
    "torch BFloat16Storage": _BFLOAT16,
}


class NoTensorError(ValueError):
    """Why it is refused, in words for who sent it."""


@dataclass(frozen=True)
class _Tensor:
    type: str
    key: str
    num_stored: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_saved_tensor(content: bytes, most_numbers: int) -> Floats:
    """Its numbers, as float32; one of more than so many is refused before they are read."""
    if content.count(_DIRECTORY_MARK) > _MOST_ENTRIES:
        raise NoTensorError("the archive has too many entries.")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            if _read(archive, names, "byteorder", 16).strip() not in (b"", b"little"):
                raise NoTensorError("its numbers are big-endian.")
            tensor = _follow(_read(archive, names, "data.pkl", _MOST_PROGRAM_BYTES))
            _check(tensor, most_numbers)
            size = np.dtype(tensor.type).itemsize
            stored = _read(archive, names, f"data/{tensor.key}", tensor.num_stored * size)
        if len(stored) != tensor.num_stored * size:
            raise NoTensorError("the archive ends within the numbers.")
        numbers = np.frombuffer(stored, dtype=tensor.type)[tensor.offset :]
        steps = tuple(stride * size for stride in tensor.strides)
        return _as_float32(np.lib.stride_tricks.as_strided(numbers, tensor.shape, steps, writeable=False))
    except NoTensorError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, *_OF_STRANGE_PROGRAMS):
        raise NoTensorError("the bytes are nothing that torch.save writes.") from None


def _read(archive: zipfile.ZipFile, names: dict[str, str], name: str, most: int) -> bytes:
    """An entry, which may be left out."""
    if name not in names:
        return b""
    entry = archive.getinfo(names[name])
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise NoTensorError("the archive is compressed or encrypted.")
    if entry.file_size > most:
        raise NoTensorError(f"{name} has {entry.file_size} bytes, at most {most} are expected.")
    return archive.read(entry)


def _follow(program: bytes) -> _Tensor:
    """What the program makes. Names and what is called stay words."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(program):
        name: str = opcode.name
        where: Any = argument
        if name in ("PROTO", "STOP"):
            continue
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[where] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo.get(where))
        elif name == "TUPLE":
            start = marks.pop()
            stack[start:] = [tuple(stack[start:])]
        elif name in _TUPLES:
            start = len(stack) - _TUPLES[name]
            stack[start:] = [tuple(stack[start:])]
        elif name in _VALUES:
            stack.append(_VALUES[name](argument))
        elif name == "BINPERSID":
            stack.append(("stored", *stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_made(stack.pop(), arguments))
        else:
            raise NoTensorError("it holds more than one dense tensor. Send torch.save(tensor).")
    [made] = stack
    if not isinstance(made, _Tensor):
        raise NoTensorError("it holds no tensor. Send torch.save(tensor).")
    return made


_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("GLOBAL", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"), lambda argument: argument),
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
}


def _made(name: Any, arguments: Any) -> Any:
    if name == _NO_HOOKS and arguments == ():
        return None
    if name == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], _Tensor):
        return arguments[0]
    if name != _TENSOR or len(arguments) < 4:
        raise NoTensorError("it holds something other than a dense tensor. Send torch.save(tensor.to_dense()).")
    (_, kind, type_name, key, _, num_stored), offset, shape, strides = arguments[:4]
    # words alone: a tuple that holds one tuple often, which holds another often, has no end for whoever reads all of it
    if not all(isinstance(word, str) for word in (kind, type_name, key)):
        raise NoTensorError("its storage has no name.")
    if kind != "storage" or type_name not in _TYPES:
        raise NoTensorError("its numbers must be of float32, float64, float16 or bfloat16.")
    numbers = (num_stored, offset, *shape, *strides)
    if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) != len(strides):
        raise NoTensorError("its shape is none of a dense tensor.")
    return _Tensor(_TYPES[type_name], key, num_stored, offset, shape, strides)


def _check(tensor: _Tensor, most_numbers: int) -> None:
    if len(tensor.shape) > _MOST_DIMENSIONS:
        raise NoTensorError(f"it has {len(tensor.shape)} dimensions.")
    count = math.prod(tensor.shape)
    if count > most_numbers or tensor.num_stored > 2 * most_numbers:
        raise NoTensorError(
            f"a tensor of shape {list(tensor.shape)} and {tensor.num_stored} numbers beneath it is too large: at most "
            f"{most_numbers} numbers are taken. Send tensor.clone() of fewer tokens."
        )
    if count > max(tensor.num_stored, _MOST_REPEATED):
        # a few bytes would take as much memory as the longest prompt, and a request has many prompts
        raise NoTensorError(f"{tensor.num_stored} numbers stand for {count}. Send tensor.contiguous().")
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if count and last >= tensor.num_stored:
        raise NoTensorError("its shape reaches beyond its numbers.")


def _as_float32(numbers: npt.NDArray[Any]) -> Floats:
    if numbers.dtype == np.dtype(_BFLOAT16):
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # what is not finite is refused by whoever reads it
        return np.ascontiguousarray(numbers, dtype=np.float32)
