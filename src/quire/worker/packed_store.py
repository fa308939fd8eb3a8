"""Packed weights of models that were loaded before, in files that the next start maps instead of packing anew.

    <cache folder>/packed/<digest>.weights      a line of JSON: name -> [type, shape, offset]; then the tensors

The digest stands for all that packed weights depend on: the checkpoint's files (path, size, time of change), type,
quantisation, rank, and the code that packs. A file that does not fit the model is not used. Owns these files and
their number; never touches the checkpoint. Called by `model_loader.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quire.cache_folder import cache_folder, check_private
from quire.version import __version__
from quire.worker.huge_pages import HugePages, read_in_huge_pages

_logger = logging.getLogger(__name__)
_VERSION = 1
_LINE = 64  # bytes; kernels read whole cache lines
_LONGEST_INDEX = 64 << 20
# Smaller models are packed before a file is open.
_SMALLEST = 256 << 20
_WRITTEN_AT_ONCE = 2 << 20
# A program that ends sooner than its file is written waits so long for it.
_SECONDS_AFTER_END = 3.0
_TYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class PackedStore:
    """The files for one model as it is loaded; `max_bytes` bounds those of all models."""

    file: Path
    max_bytes: int

    @classmethod
    def of(cls, checkpoint: Path, form: str, max_bytes: int) -> PackedStore:
        """`form` says how the weights are wanted and what packs them: type, quantisation, rank, kernels."""
        folder, kinds = (checkpoint.parent, "*.gguf") if checkpoint.is_file() else (checkpoint, "*.safetensors")
        files = [file for file in (*folder.glob(kinds), folder / "config.json") if file.is_file()]
        digest = hashlib.sha256(f"{_VERSION} {__version__} {form} {checkpoint.name}".encode())
        for file in sorted(files):
            status = file.stat()
            digest.update(f"\n{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
        return cls(cache_folder() / "packed" / f"{digest.hexdigest()[:32]}.weights", max_bytes)

    def load(self, model: nn.Module) -> bool:
        """Put the weights of the file into the model, if there is one that fits. Pages are read when touched."""
        try:
            check_private(self.file.parent)
            data, tensors = _mapped(self.file)
            places = _places(model, tensors)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            _logger.warning("%s is of no use and will be written anew: %s", self.file, error)
            return False
        with contextlib.suppress(OSError):  # where nothing may be written, nothing has to make room either
            os.utime(self.file)
        for module, leaf, tensor in places:
            if leaf == "packed":
                module.packed = tensor
            else:
                module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        # The system calls such memory available, as it could read it again at any time.
        model.num_mapped_bytes = data.nbytes
        model.moving_weights = HugePages(data)
        model.costs_file = self.file.with_suffix(".costs")
        _logger.info("packed weights come from %s", self.file)
        return True

    def save_soon(self, model: nn.Module) -> None:
        """Write the model's weights in a thread of its own, unless they are few or too many."""
        state = _state(model)
        num_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in state.values()}.values())
        is_packed = any(name.endswith(".packed") for name in state)
        if is_packed and _SMALLEST <= num_bytes <= self.max_bytes:
            # the program waits for it at its end, whatever thread has loaded the model
            keeping = threading.Thread(
                target=self._save, args=(state, num_bytes), name="quire-keep-packed", daemon=False
            )
            keeping.start()
            model.keeping_weights = keeping

    def _save(self, state: dict[str, Tensor], num_bytes: int) -> None:
        folder = self.file.parent
        unfinished = folder / f"{self.file.stem}.{os.getpid()}.part"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(folder)
            _remove_unfinished(folder)
            if shutil.disk_usage(folder).free < 4 * num_bytes:
                _logger.info("packed weights are not kept: less than %d bytes are free in %s", 4 * num_bytes, folder)
                return
            _write(unfinished, state)
            unfinished.replace(self.file)
        except (OSError, ValueError) as error:
            _logger.warning("packed weights could not be kept for the next start: %s", error)
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return
        _logger.info(
            "packed weights are kept in %s (%.1f GiB) for the next start; packed_weights_cache=0 keeps none",
            self.file,
            num_bytes / 2**30,
        )
        with contextlib.suppress(OSError):  # another process may remove the same files
            self._make_room()

    def _make_room(self) -> None:
        """Those that were not used for the longest time go first."""
        files = sorted(self.file.parent.glob("*.weights"), key=lambda file: file.stat().st_mtime, reverse=True)
        total = 0
        for file in files:
            total += file.stat().st_size
            if total > self.max_bytes and file != self.file:
                file.unlink(missing_ok=True)
                file.with_suffix(".costs").unlink(missing_ok=True)


def num_mapped_bytes(model: nn.Module) -> int:
    """Of the model's weights, what lies in a file."""
    return int(getattr(model, "num_mapped_bytes", 0))


def costs_file(model: nn.Module) -> Path | None:
    """Where it is kept what steps of the model take; None: nowhere, because its packed weights are in no file."""
    return getattr(model, "costs_file", None)


def move_soon(model: nn.Module) -> None:
    """Weights that lie in a file go into huge pages, beside the steps."""
    moving: HugePages | None = getattr(model, "moving_weights", None)
    if moving is not None:
        moving.start()


def stop_moving(model: nn.Module) -> None:
    """Who lets go of weights does so afterwards."""
    moving: HugePages | None = getattr(model, "moving_weights", None)
    if moving is not None:
        moving.stop()


def settle(model: nn.Module) -> None:
    """Who changes weights does so afterwards: the file is for those of the checkpoint, and a piece that is being moved
    would lose what is written."""
    stop_moving(model)
    keeping: threading.Thread | None = getattr(model, "keeping_weights", None)
    if keeping is not None:
        keeping.join()


def _state(model: nn.Module) -> dict[str, Tensor]:
    """What loading filled: packed weights, and parameters that were not packed."""
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        leaves = {**module._parameters, "packed": module._buffers.get("packed")}
        state |= {f"{path}.{leaf}": tensor for leaf, tensor in leaves.items() if tensor is not None and tensor.numel()}
    return state


def _places(model: nn.Module, tensors: dict[str, Tensor]) -> list[tuple[nn.Module, str, Tensor]]:
    """Where each tensor goes. Every parameter of the model has one, or is the weight that was packed."""
    places: list[tuple[nn.Module, str, Tensor]] = []
    left = dict(tensors)
    for path, module in model.named_modules():
        packed = left.pop(f"{path}.packed", None)
        if packed is not None:
            if "packed" not in module._buffers:
                raise ValueError(f"{path} takes no packed weight")
            places.append((module, "packed", packed))
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            tensor = left.pop(f"{path}.{leaf}", None)
            if tensor is None and leaf == "weight" and packed is not None:
                tensor = parameter.new_empty(0)
            elif tensor is None or tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
                raise ValueError(f"it has no such weight as {path}.{leaf}")
            places.append((module, leaf, tensor))
    if left:
        raise ValueError(f"the model has no place for {next(iter(left))}")
    return places


def _write(file: Path, state: dict[str, Tensor]) -> None:
    index: dict[str, Any] = {}
    offsets: dict[int, int] = {}
    tensors: list[Tensor] = []
    end = 0
    for name, tensor in state.items():
        if tensor.data_ptr() not in offsets:  # a head and the embedding that is tied to it
            offsets[tensor.data_ptr()] = end
            tensors.append(tensor.detach().contiguous())
            end += -(-tensor.nbytes // _LINE) * _LINE
        index[name] = [str(tensor.dtype), list(tensor.shape), offsets[tensor.data_ptr()]]
    head = json.dumps(index).encode()
    head += b" " * (-(len(head) + 1) % _LINE) + b"\n"
    with file.open("wb", buffering=0) as out:
        pieces = _LargePieces(out)
        pieces.add(memoryview(head))
        for tensor in tensors:
            data = memoryview(tensor.flatten().view(torch.uint8).numpy())
            pieces.add(data)
            pieces.add(memoryview(bytes(-len(data) % _LINE)))
        pieces.write_rest()
        os.fsync(out.fileno())  # or a crash of the machine could leave a file of the right name without its contents


class _LargePieces:
    """Writes whole pieces at multiples of their length.

    The system keeps in pages of 2 MiB what was written so, and some of it in small ones if it began and ended anywhere;
    from large ones a token's weights are read a few percent faster.
    """

    def __init__(self, out: RawIOBase) -> None:
        self._out = out
        self._piece = memoryview(bytearray(_WRITTEN_AT_ONCE))
        self._length = 0
        self._patience = _Patience()

    def add(self, data: memoryview) -> None:
        while len(data):
            part = data[: len(self._piece) - self._length]
            self._piece[self._length : self._length + len(part)] = part
            self._length += len(part)
            data = data[len(part) :]
            if self._length == len(self._piece):
                self.write_rest()

    def write_rest(self) -> None:
        self._patience.check()
        left = self._piece[: self._length]
        while len(left):
            left = left[self._out.write(left) or 0 :]
        self._length = 0


class _Patience:
    """Ends soon after the program has ended: nobody should wait for a file that makes the next start faster."""

    def __init__(self) -> None:
        self._deadline: float | None = None

    def check(self) -> None:
        """Raises OSError if it is over."""
        if threading.main_thread().is_alive():
            return
        now = time.monotonic()
        self._deadline = self._deadline or now + _SECONDS_AFTER_END
        if now > self._deadline:
            raise InterruptedError("the program ended before they were written")


def _mapped(file: Path) -> tuple[npt.NDArray[np.uint8], dict[str, Tensor]]:
    """The whole file, and the tensors in it."""
    with file.open("rb") as opened:
        head = opened.readline(_LONGEST_INDEX)
    index = json.loads(head)
    if not isinstance(index, dict):
        raise ValueError("its first line is no index")
    # A private mapping: what would be written stays in this process.
    whole = np.memmap(file, dtype=np.uint8, mode="c", offset=0)
    read_in_huge_pages(whole)
    data = torch.from_numpy(whole)[len(head) :]
    tensors: dict[str, Tensor] = {}
    for name, (kind, shape, offset) in index.items():
        dtype = _TYPES[kind]
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if offset < 0 or offset % _LINE or num_bytes < 0 or offset + num_bytes > len(data):
            raise ValueError("it is cut off or damaged")
        tensors[name] = data[offset : offset + num_bytes].view(dtype).view(shape)
    return whole, tensors


def _remove_unfinished(folder: Path) -> None:
    """What processes left that ended while they wrote."""
    for part in folder.glob("*.part"):
        process = part.name.split(".")[-2]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            part.unlink(missing_ok=True)
