"""What tells a model's weights from all others: engines with equal ones compute equal keys and values.

Of each file the size, of safetensors the header (names, types, shapes) and a sample of every tensor, of other files a
sample of evenly spread places: a few thousand reads, milliseconds where gigabytes would take many seconds. Training
changes a tensor nearly everywhere, so a sample tells; what edits a few rows and leaves the rest is not seen. A hub's
cache names its files by the digest of their whole content, which is taken instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_SAMPLE_BYTES = 256
_NUM_OF_A_TENSOR = 4
_NUM_OF_A_FILE = 4096
_MOST_HEADER_BYTES = 1 << 28
_IS_DIGEST = re.compile(r"[0-9a-f]{64}")


def weights_fingerprint(model: Path, *, load_format: str, seed: int) -> str:
    """`model`: a directory or a file. Of random weights: what they are made from."""
    hasher = hashlib.blake2b(digest_size=16)
    folder = model if model.is_dir() else model.parent
    config = folder / "config.json"
    if config.exists():
        hasher.update(_without_names(config.read_bytes()))
    if load_format == "dummy":
        hasher.update(f"dummy {seed}".encode())
        return hasher.hexdigest()
    files = [model] if model.is_file() else sorted(one for one in model.iterdir() if one.suffix in _SUFFIXES)
    for path in files:
        hasher.update(path.name.encode() if model.is_dir() else b"")
        for piece in _pieces_of(path):
            hasher.update(struct.pack("<q", len(piece)))
            hasher.update(piece)
    return hasher.hexdigest()


def _without_names(content: bytes) -> bytes:
    """A configuration without what says where it was saved, and by which version of a library."""
    try:
        config = json.loads(content)
    except ValueError:
        return content
    if isinstance(config, dict):
        config = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    return json.dumps(config, sort_keys=True).encode()


def _pieces_of(path: Path) -> Iterator[bytes]:
    target = os.path.realpath(path)
    if _IS_DIGEST.fullmatch(os.path.basename(target)):
        yield os.path.basename(target).encode()
        return
    with open(target, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        yield struct.pack("<q", size)
        if path.suffix == ".safetensors" and (header := _header_of(file, size)) is not None:
            yield header
            start = 8 + len(header)
            for first, last in _tensors_of(header):
                yield from _samples(file, start + first, start + last, _NUM_OF_A_TENSOR)
        else:
            yield from _samples(file, 0, size, _NUM_OF_A_FILE)


def _header_of(file: BinaryIO, size: int) -> bytes | None:
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
        return None
    return file.read(length)


def _tensors_of(header: bytes) -> list[tuple[int, int]]:
    try:
        entries = json.loads(header).values()
        return sorted(tuple(entry["data_offsets"]) for entry in entries if "data_offsets" in entry)
    except (ValueError, AttributeError, TypeError, KeyError):
        return []


def _samples(file: BinaryIO, first: int, end: int, number: int) -> Iterator[bytes]:
    """So many, the first and the last bytes among them."""
    room = max(0, end - first - _SAMPLE_BYTES)
    for place in sorted({first + room * i // max(1, number - 1) for i in range(number)}):
        file.seek(place)
        yield file.read(min(_SAMPLE_BYTES, end - place))
