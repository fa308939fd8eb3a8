"""The head of a GGUF file: its metadata, and where its tensors lie.

    "GGUF"  version  number of tensors  number of keys          little endian; a text is a length and UTF-8
    key  kind  value                                            an array is a kind, a length and its items
    name  sizes (the innermost first)  type  offset             one a tensor
    padding to the alignment, then the tensors

Owns the bounds: nothing is read, and no size believed, beyond the end of the file. Written here because a vocabulary
of 150,000 tokens takes the package `gguf` seven seconds to step over, at every start. Imports neither numpy nor torch.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from quire.errors import ModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_STRING = 8
_ARRAY = 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Longer arrays (the vocabulary) stay in the file until somebody asks.
_SHORT_ARRAY = 512
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

# number -> (name, numbers in a block, bytes of a block)
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 28: ("F64", 1, 8), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
}  # fmt: skip


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is in the order of other formats: [outputs, inputs] for a weight."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def type_name(self) -> str:
        return TYPES[self.type_id][0]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        _, per_block, block_bytes = TYPES[self.type_id]
        return self.num_elements // per_block * block_bytes


@dataclass(frozen=True)
class LongArray:
    """An array that was stepped over: its place in the file."""

    kind: int
    length: int
    position: int


@dataclass(frozen=True)
class GGUFFile:
    """Metadata by key and tensors by name; a model in several files is one of these."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @classmethod
    def read(cls, path: Path) -> GGUFFile:
        """Once a file, as long as it stays the same."""
        try:
            state = path.stat()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error}).") from error
        return _read(path, state.st_mtime_ns, state.st_size)

    def array(self, key: str) -> list[Any]:
        """The items of an array, [] if there is none."""
        value = self.metadata.get(key)
        if not isinstance(value, LongArray):
            return value if isinstance(value, list) else []
        with _opened(self.path) as data:
            return _Cursor(self.path, data, value.position).items(value.kind, value.length)

    def has(self, key: str) -> bool:
        return key in self.metadata


def is_gguf(path: Path) -> bool:
    """By its first bytes, whatever it is called."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


@lru_cache(maxsize=4)
def _read(path: Path, mtime_ns: int, size: int) -> GGUFFile:
    metadata, tensors = _read_one(path)
    num_files = metadata.get("split.count", 1)
    for other in _other_parts(path, num_files):
        tensors += _read_one(other)[1]
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) != len(tensors):
        raise _damaged(path, "it names a tensor twice")
    return GGUFFile(path, metadata, by_name)


def _other_parts(path: Path, num_files: Any) -> list[Path]:
    """The files beside the first one of a model that was cut into several."""
    if not isinstance(num_files, int) or num_files <= 1:
        return []
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match.group(3)) != num_files:
        raise ModelError(f"{path}: is one of {num_files} files, but not named so. Keep the names that they came with.")
    if int(match.group(2)) != 1:
        raise ModelError(f"{path}: is not the first of its {num_files} files. Give the one that ends in -00001-of-...")
    others = [
        path.with_name(f"{match.group(1)}-{number:05d}-of-{num_files:05d}.gguf") for number in range(2, num_files + 1)
    ]
    absent = [other.name for other in others if not other.is_file()]
    if absent:
        raise ModelError(f"{path}: {', '.join(absent[:3])} of its {num_files} files is missing. Download it as well.")
    return others


def _read_one(path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    with _opened(path) as data:
        cursor = _Cursor(path, data, 0)
        if cursor.take(4) != MAGIC:
            raise _damaged(path, "it does not begin with GGUF")
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise ModelError(
                f"{path}: GGUF version {version} is not read, only {' and '.join(map(str, _VERSIONS))} in little "
                "endian. Convert the model again with a newer llama.cpp."
            )
        num_tensors = cursor.number("Q")
        num_keys = cursor.number("Q")
        metadata = {}
        for _ in range(num_keys):
            key = cursor.text()
            metadata[key] = cursor.value(cursor.number("I"))
        heads = [_tensor_head(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise _damaged(path, f"general.alignment={alignment!r} is no power of two")
        start = -(-cursor.position // alignment) * alignment
        return metadata, [_placed(path, head, start, alignment, len(data)) for head in heads]


def _tensor_head(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    name = cursor.text()
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise _damaged(cursor.path, f"{name} has {num_dimensions} dimensions")
    sizes = [cursor.number("Q") for _ in range(num_dimensions)]
    return name, sizes, cursor.number("I"), cursor.number("Q")


def _placed(path: Path, head: tuple[str, list[int], int, int], start: int, alignment: int, size: int) -> GGUFTensor:
    name, sizes, type_id, offset = head
    if type_id not in TYPES:
        raise ModelError(
            f"{path}: {name} is of type number {type_id}, which is not known here. Known are "
            f"{', '.join(name for name, _, _ in TYPES.values())}."
        )
    tensor = GGUFTensor(name, type_id, tuple(reversed(sizes)), path, start + offset)
    per_block = TYPES[type_id][1]
    # Python's numbers do not overflow, so a size that is too large is found here.
    if min(sizes) < 1 or sizes[0] % per_block:
        raise _damaged(path, f"{name} has the sizes {sizes}, {tensor.type_name} comes in blocks of {per_block}")
    if offset % alignment or tensor.offset + tensor.num_bytes > size:
        raise _damaged(path, f"{name} would end at byte {tensor.offset + tensor.num_bytes} of {size}")
    return tensor


class _Cursor:
    """A place in the file that moves on; every step is checked against the end."""

    def __init__(self, path: Path, data: mmap.mmap, position: int) -> None:
        self.path = path
        self.position = position
        self._data = data

    def take(self, num_bytes: int) -> bytes:
        begin = self.position
        self._advance(num_bytes)
        return self._data[begin : self.position]

    def number(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return value

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"a text at byte {self.position} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise _damaged(self.path, f"there is a value of kind {kind} at byte {self.position}")
        item = self.number("I")
        length = self.number("Q")
        if item != _STRING and item not in _SCALARS:
            raise _damaged(self.path, f"there is an array of kind {item} at byte {self.position}")
        if length <= _SHORT_ARRAY:
            return self.items(item, length)
        skipped = LongArray(item, length, self.position)
        self._step_over(item, length)
        return skipped

    def items(self, kind: int, length: int) -> list[Any]:
        if kind == _STRING:
            return self._texts(length)
        code = f"<{length}{_SCALARS[kind]}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))

    def _texts(self, length: int) -> list[str]:
        """As `text`, written out: there are hundreds of thousands."""
        found: list[str] = []
        data = self._data
        unpack = struct.Struct("<Q").unpack_from
        position = self.position
        try:
            for _ in range(length):
                end = position + 8 + unpack(data, position)[0]
                text = data[position + 8 : end]
                if len(text) != end - position - 8:
                    raise _damaged(self.path, f"it ends inside of a text at byte {position}")
                # A token may be a piece of a character.
                found.append(text.decode("utf-8", "surrogateescape"))
                position = end
        except (struct.error, OverflowError) as error:
            raise _damaged(self.path, "it ends inside of a list of texts") from error
        self.position = position
        return found

    def _step_over(self, kind: int, length: int) -> None:
        if kind != _STRING:
            self._advance(length * struct.calcsize("<" + _SCALARS[kind]))
            return
        data = self._data
        unpack = struct.Struct("<Q").unpack_from
        position = self.position
        try:
            for _ in range(length):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError) as error:
            raise _damaged(self.path, "it ends inside of a list of texts") from error
        self._advance(position - self.position)

    def _advance(self, num_bytes: int) -> None:
        if self.position + num_bytes > len(self._data):
            raise _damaged(self.path, f"it ends before byte {self.position + num_bytes}")
        self.position += num_bytes


@contextmanager
def _opened(path: Path) -> Iterator[mmap.mmap]:
    """A file mapped for reading, let go of at the end."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error}).") from error
    with file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        with data:
            yield data


def _damaged(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path}: damaged or cut off ({reason}). Compare its size with the source; download it again.")
