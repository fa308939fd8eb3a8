"""The safetensors files of a checkpoint, read tensor by tensor.

Owns: which files belong to a checkpoint, and that at most a small part of them is mapped into memory at a time. Must
never: unpickle anything. Called by: `model_loader.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import ModelError
from quire.json_files import read_object
from quire.panics import PanicError, panics_are_errors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Pages of a mapped file count as memory of this process. Mapping anew after so many bytes keeps the peak at the
# model's weights plus this, or plus one tensor.
_REMAP_BYTES = 64 * 2**20
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_MOST_PARTS = 10_000
# what a repository holds in the place of a file that was not fetched
_POINTER = b"version https://git-lfs"
_MOST_POINTER_BYTES = 1024


class CheckpointFiles:
    """The tensors of a checkpoint directory by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # file -> names of its tensors
        self.names_by_file: dict[Path, list[str]] = {}
        for file in _files_of(path):
            self.names_by_file[file] = _names_in(file)
        self._check_index()
        self.names = {name for names in self.names_by_file.values() for name in names}

    @classmethod
    def at(cls, path: Path) -> CheckpointFiles:
        """Those of a directory, or one file by itself."""
        if path.is_dir():
            return cls(path)
        files = cls.__new__(cls)
        files.path = path
        files.names_by_file = {path: _names_in(path)}
        files.names = set(files.names_by_file[path])
        return files

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.names_by_file)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor, whole and in the checkpoint's type; use each before asking for the next."""
        for file, names in self.names_by_file.items():
            try:
                yield from _tensors_in(file, names)
            except (SafetensorError, OSError) as error:
                raise _damaged(file, error) from error

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        """A function that reads a tensor by name, in any order; use each tensor before asking for many more."""
        reader = _NamedTensors({name: file for file, names in self.names_by_file.items() for name in names})
        try:
            yield reader.get
        finally:
            reader.close()

    def _check_index(self) -> None:
        index = self.path / INDEX
        if not index.is_file():
            return
        found = {(name, file.name) for file, names in self.names_by_file.items() for name in names}
        promised = set(_read_index(index).items())
        absent = sorted(name for name, _ in promised - found)
        if absent:
            raise ModelError(
                f"{index}: {len(absent)} tensors are not in the files that it names, such as {absent[0]}. "
                "Download the checkpoint again."
            )


def _files_of(path: Path) -> list[Path]:
    index = path / INDEX
    if index.is_file():
        files = [path / name for name in sorted(set(_read_index(index).values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ModelError(f"{path}: {', '.join(absent)} named by {INDEX} is missing. Download the checkpoint again.")
        return files
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    others = sorted(path.glob("*.safetensors"))
    _check_parts(path, others)
    if others and not any("adapter" in file.name for file in others):
        return others
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickled:
        raise ModelError(
            f"{path}: only {pickled[0]} and the like, which are Python pickles and could run any code when read. "
            "load_format=pt takes tensors alone out of .bin files and refuses all else; or convert them to safetensors "
            "with save_pretrained of the Transformers library."
        )
    raise ModelError(f"{path}: no {SINGLE} there. Random weights need load_format=dummy.")


def _check_parts(path: Path, files: list[Path]) -> None:
    """Names count the parts of a checkpoint: those of a download that ended early."""
    found: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if part := _PART.fullmatch(file.name):
            found.setdefault((part[1], int(part[3])), set()).add(int(part[2]))
    for (stem, count), numbers in found.items():
        absent = sorted(set(range(1, count + 1)) - numbers) if count <= _MOST_PARTS else []
        if absent:
            raise ModelError(
                f"{path}: {len(absent)} of {count} files are missing, such as "
                f"{stem}-{absent[0]:05}-of-{count:05}.safetensors. Download it again: what came whole is kept."
            )


def _read_index(index: Path) -> dict[str, str]:
    try:
        files = read_object(index)["weight_map"]
        valid = all(isinstance(name, str) and Path(file).name == file for name, file in files.items())
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: cannot be read as an index of tensors ({error!r}).") from error
    if not valid or not files:
        raise ModelError(f"{index}: weight_map must name a file in the same directory for each tensor.")
    return dict(files)


def _names_in(file: Path) -> list[str]:
    try:
        with panics_are_errors, safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError, PanicError) as error:
        raise _damaged(file, error) from error


def _tensors_in(file: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    position = 0
    while position < len(names):
        num_bytes = 0
        with safe_open(file, framework="pt") as opened:
            while position < len(names) and num_bytes < _REMAP_BYTES:
                tensor = opened.get_tensor(names[position])
                num_bytes += tensor.nbytes
                yield names[position], tensor
                del tensor
                position += 1


class _NamedTensors:
    """Open files, each mapped anew when enough of it has been read."""

    def __init__(self, file_by_name: dict[str, Path]) -> None:
        self._file_by_name = file_by_name
        self._open: dict[Path, Any] = {}
        self._num_bytes: dict[Path, int] = {}

    def get(self, name: str) -> Tensor:
        file = self._file_by_name[name]
        try:
            with panics_are_errors:
                if file not in self._open:
                    self._open[file], self._num_bytes[file] = safe_open(file, framework="pt"), 0
                tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError, PanicError) as error:
            raise _damaged(file, error) from error
        self._num_bytes[file] += tensor.nbytes
        if self._num_bytes[file] > _REMAP_BYTES:
            del self._open[file]
        return tensor

    def close(self) -> None:
        self._open.clear()


def _damaged(file: Path, error: Exception) -> ModelError:
    size = file.stat().st_size if file.is_file() else 0
    if 0 < size < _MOST_POINTER_BYTES and file.read_bytes().startswith(_POINTER):
        return ModelError(f"{file}: is a pointer of Git LFS, not the file itself. Fetch it with git lfs pull.")
    return ModelError(
        f"{file}: damaged or cut off, {size} bytes long ({error}). Compare its size with the source, and download it "
        "again."
    )
