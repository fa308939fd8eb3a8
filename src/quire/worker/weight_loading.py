"""Filling a model with weights, layer by layer.

    checkpoint -> which parameter, which part -> quantise, if asked -> this rank's piece -> the layer is full: pack it

Owns the check that every weight came once, and the moment when a layer is packed: as soon as its last part is there.
So the most memory that loading takes is what is packed so far, and one layer. Called by `model_loader.py`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from quire.errors import ModelError
from quire.worker.checkpoints import Checkpoint
from quire.worker.layers.embedding import Embedding, LMHead
from quire.worker.layers.linear import ReplicatedLinear
from quire.worker.layers.packing import multiplies_codes
from quire.worker.layers.parameter import (
    Part,
    ShapeMismatchError,
    dequantize_waiting,
    parameter_like,
    parts_of,
    pick_piece,
    put,
    replace_weight,
)
from quire.worker.layers.quantization import GroupBorderError, QuantizedWeight, Role, Scheme, apply, keeps_codes
from quire.worker.layers.stored_weight import read
from quire.worker.models.checkpoint_map import CheckpointMap, Placement

_logger = logging.getLogger(__name__)
# Below this a progress bar is only noise.
_PROGRESS_BYTES = 500 * 10**6
BACKBONE = "model"
# of two weights that may be equal, at a time
_COMPARED_ROWS = 4096
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_weights(model: nn.Module, checkpoint: Checkpoint, scheme: Scheme | None = None) -> None:
    """Fill and pack every parameter from the checkpoint; what is missing, left over or of a wrong shape is an error."""
    checkpoint_map: CheckpointMap = getattr(model, "checkpoint_map", CheckpointMap())
    filling = _Filling(model, scheme, checkpoint_map.repeated)
    with _progress(checkpoint.num_bytes) as bar:
        for source, weight in checkpoint.tensors():
            # before it is turned, for which it would be read
            if not filling.is_absent(checkpoint_map.rename(source)):
                for placement in checkpoint_map.place(source, weight):
                    if not filling.is_absent(placement.name):
                        filling.add(placement, source)
            bar.update(weight.nbytes)
    filling.finish()


def check_finite(source: str, weight: Tensor | QuantizedWeight) -> None:
    """One broken number would make every answer NaN, and nobody would know from where."""
    numbers = [weight.scales, weight.offsets] if isinstance(weight, QuantizedWeight) else [weight]
    for tensor in numbers:
        if tensor is None or tensor.dtype not in WEIGHT_TYPES or not tensor.numel():
            continue
        # one pass; a NaN is the least and the greatest of all
        if not all(bound.isfinite() for bound in torch.aminmax(tensor)):
            raise ModelError(f"{source}: holds infinities or NaN. Download the checkpoint again.")


def pack_weights(model: nn.Module) -> None:
    """Let every layer that can do so replace its weight by a packed one, one layer at a time."""
    for module in model.modules():
        _pack(module)


def make_weights(model: nn.Module, make: Callable[[str, Tensor], None], scheme: Scheme | None = None) -> None:
    """The same for weights that `make` writes, parameter by parameter."""
    holders = Holders(model)
    unfilled = dict.fromkeys(name for name, _ in model.named_parameters())
    for name in list(unfilled):
        parameter = model.get_parameter(name)
        role = holders.role(name)
        make(name, parameter.data)
        if scheme is not None and role is not None:
            weight = apply(scheme, parameter.data, role, name)
            if isinstance(weight, QuantizedWeight):
                replace_weight(parameter, weight)
        del parameter, unfilled[name]
        holders.pack(name, unfilled)


class Holders:
    """Which modules hold a parameter: two, if a head is tied to an embedding. The head comes first, as it packs."""

    def __init__(self, model: nn.Module) -> None:
        first_name: dict[int, str] = {}
        self.first_name: dict[str, str] = {}
        self._modules: dict[str, list[nn.Module]] = {}
        self._names: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{path}.{leaf}" if path else leaf
                first = first_name.setdefault(id(parameter), name)
                self.first_name[name] = first
                self._modules.setdefault(first, []).append(module)
                self._names.setdefault(module, []).append(first)
        for modules in self._modules.values():
            modules.sort(key=lambda module: not isinstance(module, LMHead))

    def of(self, first_name: str) -> list[nn.Module]:
        return self._modules[first_name]

    def role(self, first_name: str) -> Role | None:
        """What a weight does, None for those that are never quantised: norms, biases, layers of other kinds."""
        modules = self._modules[first_name]
        if not first_name.endswith("weight") or getattr(modules[0], "is_kept_as_float", False):
            return None
        kinds: tuple[tuple[type[nn.Module], Role], ...] = (
            (LMHead, "head"),
            (Embedding, "embedding"),
            (ReplicatedLinear, "linear"),
        )
        return next((role for kind, role in kinds if isinstance(modules[0], kind)), None)

    def pack(self, first_name: str, unfilled: Collection[str]) -> None:
        """After a parameter was filled: pack the modules that hold it, if their other parameters are filled too."""
        for module in self._modules[first_name]:
            if not any(name in unfilled for name in self._names[module]):
                _pack(module)


def _pack(module: nn.Module) -> None:
    pack = getattr(module, "pack_weights", None)
    if pack is not None:
        pack()
    for parameter in module.parameters(recurse=False):
        dequantize_waiting(parameter)


class _Filling:
    """The parameters of a model that are still to come."""

    def __init__(self, model: nn.Module, scheme: Scheme | None, repeated: Collection[str]) -> None:
        self._model = model
        self._scheme = scheme
        self._holders = Holders(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parts = {name: parts_of(parameter) for name, parameter in parameters.items()}
        # Only until they are full: a layer that is packed lets go of its floats.
        self._parameters = {name: parameters[name] for name in set(self._holders.first_name.values())}
        self._waiting: dict[str, set[Part]] = {name: set(self._parts[name]) for name in self._parameters}
        self._absent = absent_modules(model)
        names = [name for name, first in self._holders.first_name.items() if name != first]
        self._first_of_tied = {name: self._holders.first_name[name] for name in names}
        # What is tied is not read before everything has been seen: the checkpoint may hold two weights.
        self._late = {*self._first_of_tied, *self._first_of_tied.values(), *repeated}
        self._tied: dict[str, tuple[Placement, str]] = {}
        self._unexpected: list[str] = []

    def is_absent(self, name: str) -> bool:
        return is_absent(name, self._absent)

    def add(self, placement: Placement, source: str) -> None:
        if placement.name not in self._parts:
            # a checkpoint of a backbone alone, as embedding models come, does not say what it is a part of
            placement = placement._replace(name=f"{BACKBONE}.{placement.name}")
        if placement.part not in self._parts.get(placement.name, ()):
            self._unexpected.append(source)
            return
        if placement.name in self._late:
            other, other_source = self._tied.setdefault(placement.name, (placement, source))
            if other_source != source and not self._is_equal(placement, other, source):
                raise ModelError(
                    f"{source}: differs from {other_source}, and Quire has one weight for both. Take a checkpoint in "
                    "which they are the same."
                )
        elif placement.name in self._parameters:
            self._load(placement.name, placement, source)

    def finish(self) -> None:
        for head, embedding in self._first_of_tied.items():
            self._settle(head, embedding)
        for name, (placement, source) in self._tied.items():
            self._load(name, placement, source)
        _check_complete({(name, part) for name, parts in self._waiting.items() for part in parts}, self._unexpected)

    def _settle(self, head: str, embedding: str) -> None:
        """A tied head that the checkpoint holds alone stands for the embedding. Beside it, it is the same once more,
        or config.json is wrong and there are two: in either case as in Transformers."""
        if head not in self._tied:
            return
        placement, source = self._tied.pop(head)
        if embedding not in self._tied:
            self._tied[embedding] = (placement._replace(name=embedding), source)
            return
        other, other_source = self._tied[embedding]
        if self._is_equal(placement, other, source):
            return
        _logger.warning(
            "config.json says tie_word_embeddings=true, but %s and %s of the checkpoint differ: both are used. Correct "
            "config.json, so that nobody takes one for the other.",
            source,
            other_source,
        )
        path, _, leaf = head.rpartition(".")
        own = parameter_like(self._parameters[embedding])
        setattr(self._model.get_submodule(path), leaf, own)
        self._holders = Holders(self._model)
        self._parameters[head] = own
        self._waiting[head] = set(self._parts[head])
        self._tied[head] = (placement, source)

    def _is_equal(self, head: Placement, embedding: Placement, source: str) -> bool:
        """In numbers of the model's type, and in what this rank keeps: nothing else comes from here. A scheme treats an
        embedding in another way than a head, so that all ranks must see the same then."""
        parameter = self._parameters[self._first_of_tied.get(embedding.name, embedding.name)]
        with _misfits_named(source):
            pieces: list[Any] = [pick_piece(parameter, placement.weight)[1] for placement in (head, embedding)]
        if self._scheme is not None:
            pieces = [head.weight, embedding.weight]
        num_rows = pieces[0].shape[0]
        for start in range(0, num_rows, _COMPARED_ROWS):
            length = min(_COMPARED_ROWS, num_rows - start)
            first, second = (_as_floats(read(piece.narrow(0, start, length)), parameter.dtype) for piece in pieces)
            if not torch.equal(first, second):
                return False
        return True

    def _load(self, name: str, placement: Placement, source: str) -> None:
        parameter = self._parameters[name]
        weight = placement.weight
        if isinstance(weight, Tensor) and weight.dtype not in WEIGHT_TYPES:
            raise ModelError(
                f"{source}: is stored as {str(weight.dtype).removeprefix('torch.')}, so it is quantised, but its scale "
                "is missing, or config.json does not say how (quantization_config). Download the checkpoint again."
            )
        with _misfits_named(source):
            place, piece = self._piece_of(name, placement, source)
        if isinstance(piece, QuantizedWeight):
            piece = piece.to(parameter.device)
            if not multiplies_codes(parameter.device):
                piece = piece.dequantize(parameter.dtype)
        put(parameter, place, piece)
        self._waiting[name].discard(placement.part)
        if not self._waiting[name]:
            del self._parameters[name], parameter
            self._holders.pack(name, self._parameters)

    def _piece_of(self, name: str, placement: Placement, source: str) -> tuple[Tensor, Tensor | QuantizedWeight]:
        """Its place, and what this rank keeps. Nothing else of the weight is looked at: it may never leave the file."""
        parameter = self._parameters[name]
        place, stored = pick_piece(parameter, placement.weight, placement.part)
        piece = read(stored)
        check_finite(source, piece)
        return quantized_piece(self._scheme, self._holders.role(name), parameter, placement, place, piece, source)


@contextmanager
def _misfits_named(source: str) -> Iterator[None]:
    try:
        yield
    except ShapeMismatchError as error:
        raise ModelError(
            f"{source}: {error}. config.json and the weights do not belong together; download the checkpoint again."
        ) from None
    except GroupBorderError as error:
        raise ModelError(f"{source}: {error}. Choose another number of workers.") from None


def _as_floats(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)


def quantized_piece(
    scheme: Scheme | None,
    role: Role | None,
    parameter: Tensor,
    placement: Placement,
    place: Tensor,
    piece: Tensor | QuantizedWeight,
    source: str,
) -> tuple[Tensor, Tensor | QuantizedWeight]:
    """What this rank keeps of a weight of the checkpoint, as codes where a scheme makes some, and its place."""
    weight = placement.weight
    if scheme is None or role is None or len(weight.shape) != 2:
        return place, piece
    if piece.shape[1] == weight.shape[1] or keeps_codes(scheme, piece, role):
        return place, apply(scheme, piece, role, source, weight.shape)
    # The scale of a row must not depend on the number of ranks.
    whole = apply(scheme, read(weight), role, source, weight.shape)
    return pick_piece(parameter, whole, placement.part)


def absent_modules(model: nn.Module) -> frozenset[str]:
    """What other workers have instead of this one: `absent_modules` of a module are paths below it."""
    return frozenset(
        f"{path}.{absent}" if path else absent
        for path, module in model.named_modules()
        for absent in getattr(module, "absent_modules", ())
    )


def is_absent(name: str, absent: frozenset[str]) -> bool:
    """Another worker has this weight, or all of the module that it is a part of."""
    if not absent:
        return False
    return any(
        path in absent
        for full_name in (name, f"{BACKBONE}.{name}")
        for path in accumulate(full_name.split("."), "{}.{}".format)
    )


def _check_complete(waiting: set[tuple[str, Part]], unexpected: list[str]) -> None:
    if waiting:
        names = sorted(name if part is None else f"{name} ({part})" for name, part in waiting)
        raise ModelError(
            f"the checkpoint lacks {len(names)} of the model's weights: {_listed(names)}."
            + (f" It holds {_listed(unexpected)}, which the model does not know." if unexpected else "")
            + " Config.json, with hf_overrides, and weights do not belong together, or a file is missing."
        )
    if unexpected:
        raise ModelError(
            f"the checkpoint holds {len(unexpected)} tensors that the model does not know: {_listed(unexpected)}. "
            "Config.json, with hf_overrides, and weights do not belong together, or the architecture "
            "differs from Quire's: try model_impl=transformers."
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _progress(num_bytes: int) -> Any:
    is_quiet = not sys.stderr.isatty() or num_bytes < _PROGRESS_BYTES
    return tqdm(total=num_bytes, desc="loading weights", unit="B", unit_scale=True, disable=is_quiet)
