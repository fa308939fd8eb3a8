"""Other numbers for the weights of a model that runs, in place: whoever knows where one lies sees the new ones.

    file -> which parameter, which part -> quantise, if the model is -> whole? -> pack -> over the old one

A file is looked at twice: `check` finds whatever is wrong before the first number changes, so that a model never has
weights of two kinds. A parameter comes whole, with all parts that are one weight here; others stay as they are. Owns
nothing but a plan of the model, which takes no memory. Called by Worker, between two steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.checkpoint_files import CheckpointFiles
from quire.worker.compilation.recorded import RecordedForward
from quire.worker.kernels.reference.packed_format import PackedHeader, read_header
from quire.worker.layers.embedding import LMHead
from quire.worker.layers.parameter import Part, ShapeMismatchError, parameter_like, parts_of, pick_piece, put
from quire.worker.layers.quantization import Scheme
from quire.worker.models.checkpoint_map import CheckpointMap, Placement
from quire.worker.weight_loading import (
    BACKBONE,
    WEIGHT_TYPES,
    Holders,
    absent_modules,
    check_finite,
    is_absent,
    quantized_piece,
)

_HOST = torch.device("cpu")


class WeightUpdate:
    """From one file or folder. `plan` is the model as it is built, on `meta`."""

    def __init__(self, model: nn.Module, plan: nn.Module, scheme: Scheme | None, path: Path) -> None:
        self._path = path
        # what the file was before anybody looked into it
        self._stamp = _stamp_of(path)
        self._model = model
        self._plan = plan
        self._scheme = scheme
        _untie_as(model, plan)
        self._map: CheckpointMap = getattr(model, "checkpoint_map", CheckpointMap())
        self._parameters = dict(plan.named_parameters(remove_duplicate=False))
        self._holders = Holders(plan)
        self._paths = {module: path for path, module in plan.named_modules()}
        self._absent = absent_modules(plan)

    def is_of(self, path: Path) -> bool:
        """The same file, and nobody has touched it since."""
        return path == self._path and self._stamp == _stamp_of(path)

    def digest(self) -> str:
        """Of the bytes of all files that are read."""
        digest = hashlib.blake2b()
        for file in sorted(CheckpointFiles.at(self._path).names_by_file):
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "blake2b").digest())
        return digest.hexdigest()

    def check(self) -> None:
        """ModelError for the first thing that is wrong with what this rank keeps of it."""
        path = self._path
        waiting: dict[str, set[Part]] = {}
        first_names = self._holders.first_name
        tied = {*self._map.repeated, *(first for name, first in first_names.items() if name != first)}
        # of what has several names, where it stood first
        seen: dict[str, tuple[str, Any]] = {}
        num_tensors = 0
        for source, weight in CheckpointFiles.at(path).tensors():
            num_tensors += 1
            check_finite(source, weight)
            if weight.dtype not in WEIGHT_TYPES:
                raise ModelError(f"{source}: {weight.dtype}: must be float32, bfloat16 or float16.")
            for name, placement in self._placements(source, weight):
                parameter = self._parameters[name]
                if (first := first_names[name]) in tied:
                    other, numbers = seen.setdefault(first, (source, placement.weight))
                    if other != source and not torch.equal(numbers, placement.weight):
                        raise ModelError(
                            f"{source}: differs from {other}, and the model has one weight for both. Send one of them, "
                            "or start the engine with the new weights."
                        )
                codes = self._codes_of(name)
                if codes is not None and self._scheme is None:
                    raise ModelError(
                        f"{source}: the checkpoint came with codes in its place, and none are made of numbers. Start "
                        "the engine with the new weights instead."
                    )
                if codes is not None and codes.group and isinstance(self._model.forward, RecordedForward):
                    raise ModelError(
                        f"{source}: the recorded forward pass knows the unit of the scales of its codes (int4), which "
                        "others do not share. Start the engine with enforce_eager=True."
                    )
                try:
                    pick_piece(parameter, placement.weight, placement.part)
                except ShapeMismatchError as error:
                    raise ModelError(f"{source}: {error}. Send the weights of this model.") from None
                waiting.setdefault(name, set(parts_of(parameter))).discard(placement.part)
        missing = sorted(f"{name} ({part})" for name, parts in waiting.items() for part in parts)
        if missing:
            raise ModelError(
                f"{path.name}: lacks {missing[0]} and {len(missing) - 1} more parts of weights of which it has others. "
                "What is one weight here (query, key and value; gate and up) is sent together."
            )
        if not num_tensors:
            raise ModelError(f"{path.name}: holds no weights.")

    @torch.no_grad()
    def apply(self) -> int:
        """How many weights have changed. The file was checked; raises if it is another one by now."""
        filled: dict[str, tuple[nn.Parameter, set[Part]]] = {}
        num_weights = 0
        for source, weight in CheckpointFiles.at(self._path).tensors():
            for name, placement in self._placements(source, weight):
                if name not in filled:
                    filled[name] = parameter_like(self._parameters[name], _HOST), set(parts_of(self._parameters[name]))
                parameter, waiting = filled[name]
                role = self._holders.role(self._holders.first_name[name])
                place, piece = pick_piece(parameter, placement.weight, placement.part)
                put(parameter, *quantized_piece(self._scheme, role, parameter, placement, place, piece, source))
                waiting.discard(placement.part)
                if not waiting:
                    del filled[name]
                    self._replace(self._holders.first_name[name], parameter)
                    num_weights += 1
        if not self.is_of(self._path):
            raise ModelError(f"{self._path}: was changed while it was read. Write another file, and rename it.")
        return num_weights

    def _codes_of(self, name: str) -> PackedHeader | None:
        """How the model keeps a weight as codes, if it does."""
        first_name = self._holders.first_name[name]
        live = self._model.get_submodule(self._paths[self._holders.of(first_name)[0]])
        packed: Tensor | None = getattr(live, "packed_heads", [live._buffers.get("packed")])[0]
        old = live._parameters[first_name.rpartition(".")[2]]
        if packed is None or (old is not None and old.numel()):
            return None
        header = read_header(packed)
        return header if header.is_quantized else None

    def _placements(self, source: str, weight: Tensor) -> Iterator[tuple[str, Placement]]:
        """(name of the parameter, placement) of what this worker keeps."""
        if is_absent(self._map.rename(source), self._absent):
            return
        for placement in self._map.place(source, weight):
            if is_absent(placement.name, self._absent):
                continue
            names = (placement.name, f"{BACKBONE}.{placement.name}")
            name = next((one for one in names if one in self._parameters), None)
            if name is None or placement.part not in parts_of(self._parameters[name]):
                raise ModelError(f"{source}: the model has no such weight. Send names as its checkpoint has them.")
            yield name, placement

    def _replace(self, first_name: str, parameter: nn.Parameter) -> None:
        """The plan's module packs as the model's has packed; what comes out is copied over the old bytes."""
        leaf = first_name.rpartition(".")[2]
        holder = self._holders.of(first_name)[0]
        live = self._model.get_submodule(self._paths[holder])
        old = live._parameters[leaf]
        if old is not None and old.numel():
            old.data.copy_(parameter)
            return
        before: Any = holder._parameters[leaf]
        holder._parameters[leaf] = parameter
        holder.pack_weights()
        packed: Tensor = holder._buffers["packed"]
        live._buffers["packed"].copy_(packed)
        holder._parameters[leaf] = before
        # a tied embedding has it as well
        for module in self._holders.of(first_name):
            module._buffers["packed"] = None


def _stamp_of(path: Path) -> list[tuple[str, int, int, int]]:
    """Which files there are, and when each was changed; nothing if they cannot be seen."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    try:
        status = [(str(file), file.stat()) for file in files]
    except OSError:
        return []
    return [(name, one.st_ino, one.st_size, one.st_mtime_ns) for name, one in status]


def _untie_as(model: nn.Module, plan: nn.Module) -> None:
    """What config.json does not say: whether the checkpoint held a head that is not the embedding."""
    for path, head in plan.named_modules():
        if isinstance(head, LMHead) and head.is_tied and not model.get_submodule(path).is_tied:
            head.weight = parameter_like(head.weight)
