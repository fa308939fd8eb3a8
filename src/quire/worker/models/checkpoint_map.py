"""Where the tensors of a checkpoint go: a table that stands at the head of each model's file.

The default is that names agree. Differences are renamed prefixes, several tensors of the checkpoint that are parts of
one parameter, tensors that mean nothing here, and layouts that must be turned first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from quire.errors import ModelError, one_line
from quire.worker.layers.parameter import Part
from quire.worker.layers.quantization import QuantizedWeight
from quire.worker.layers.stored_weight import StoredWeight, read

Weight: TypeAlias = Tensor | QuantizedWeight | StoredWeight
# What most decoders merge: three projections into one multiplication, and two.
MERGED: Mapping[str, tuple[str, Part]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
# the same where feed-forward layers have no gate
QKV = {name: MERGED[name] for name in ("q_proj", "k_proj", "v_proj")}

_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|up_proj|down_proj)")


class Placement(NamedTuple):
    """One weight's way: the parameter's name, which part of it, and the weight."""

    name: str
    part: Part
    weight: Weight


def _unchanged(name: str, weight: Weight) -> list[tuple[str, Weight]]:
    return [(name, weight)]


def split_experts(name: str, weight: Any) -> list[tuple[str, Any]]:
    """All experts of a layer in one tensor, [experts, outputs, inputs], gate and up one behind the other."""
    stacked = _STACKED.fullmatch(name)
    if stacked is None:
        return [(name, weight)]
    path, kind = stacked.groups()
    parts = {kind: weight}
    if kind == "gate_up_proj":
        parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True))
    return [
        (f"{path}.{number}.{part}.weight", matrix)
        for part, matrices in parts.items()
        for number, matrix in enumerate(matrices)
    ]


def split_qkv(num_heads: int, num_groups: int) -> Callable[[str, Tensor], list[tuple[str, Tensor]]]:
    """`query_key_value` group by group: the queries of a group, then its key, then its value."""
    module = "query_key_value"

    def convert(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        path, _, leaf = name.rpartition(".")
        if path.rpartition(".")[2] != module:
            return [(name, weight)]
        heads = weight.unflatten(0, (num_groups, num_heads // num_groups + 2, -1))
        parts = {"q_proj": heads[:, :-2], "k_proj": heads[:, -2], "v_proj": heads[:, -1]}
        parent = path.removesuffix(module)
        return [(f"{parent}{part}.{leaf}", rows.reshape(-1, *weight.shape[1:])) for part, rows in parts.items()]

    return convert


def split_rows(modules: Mapping[str, Mapping[str, int]]) -> Callable[[str, Any], list[tuple[str, Any]]]:
    """Modules that lie one behind the other in one tensor: what that is called, and their names and outputs."""

    def convert(name: str, weight: Any) -> list[tuple[str, Any]]:
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        parts = modules.get(module)
        if parts is None:
            return [(name, weight)]
        total = sum(parts.values())
        num_rows = weight.shape[0]
        # who asks for names alone has no rows
        if num_rows not in (0, total):
            raise ValueError(f"{num_rows} rows, {total} are expected")
        ends = accumulate(parts.values())
        return [
            (f"{parent}.{part}.{leaf}", weight.narrow(0, end - size, size) if num_rows else weight)
            for (part, size), end in zip(parts.items(), ends, strict=True)
        ]

    return convert


@dataclass(frozen=True)
class CheckpointMap:
    """The table of one architecture."""

    # module of the checkpoint -> (module of the model, part)
    merged: Mapping[str, tuple[str, Part]] = field(default_factory=dict)
    # module of the checkpoint -> its name here, wherever it stands in a name; an empty one is left out
    modules: Mapping[str, str] = field(default_factory=dict)
    # beginning of a name -> what stands there instead; the first that fits
    prefixes: Mapping[str, str] = field(default_factory=dict)
    # ends of names that are not weights: buffers that old versions wrote
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    # beginnings of names of modules that are not used
    ignored_modules: tuple[str, ...] = ()
    # beginnings of names here: modules that are as the checkpoint has them, neither merged nor turned
    apart: tuple[str, ...] = ()
    # weights that are one here, and that a checkpoint may hold under several names
    repeated: tuple[str, ...] = ()
    # a last look at a tensor: turn it, or cut it into several
    convert: Callable[[str, Any], list[tuple[str, Any]]] = _unchanged
    # whether it leaves the inputs of each output as they are, or does not see weights that come quantised. It may get
    # weights that are not read yet.
    converts_quantized: bool = False

    @property
    def takes_quantized(self) -> bool:
        """Codes cannot be turned."""
        return self.convert is _unchanged or self.converts_quantized

    def ignores(self, name: str) -> bool:
        """A tensor that means nothing here, so that its numbers may be any."""
        return name.endswith(self.ignored) or name.startswith(self.ignored_modules)

    def place(self, name: str, weight: Weight) -> Iterator[Placement]:
        """Nothing for an ignored tensor, otherwise its placements."""
        if self.ignores(name):
            return
        own = self.rename(name)
        if own.startswith(self.apart):
            yield Placement(own, None, weight)
            return
        for converted_name, converted in self._converted(own, weight):
            yield self._merge(converted_name, converted)

    def rename(self, name: str) -> str:
        """Its name here, as far as nothing is merged or cut into several."""
        for prefix, other in self.prefixes.items():
            if name.startswith(prefix):
                name = other + name.removeprefix(prefix)
                break
        if not self.modules:
            return name
        parts = (self.modules.get(part, part) for part in name.split("."))
        return ".".join(part for part in parts if part)

    def _converted(self, name: str, weight: Weight) -> list[tuple[str, Weight]]:
        try:
            # what would be turned must be there
            return self.convert(name, weight if self.takes_quantized else read(weight))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            # turning and cutting want a number of dimensions that a strange file need not have
            raise ModelError(
                f"{name}: {list(weight.shape)} cannot be taken apart ({one_line(error)}). config.json and the weights "
                "do not belong together; download the checkpoint again."
            ) from error

    def _merge(self, name: str, weight: Weight) -> Placement:
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        if module not in self.merged:
            return Placement(name, None, weight)
        target, part = self.merged[module]
        return Placement(f"{parent}.{target}.{leaf}" if parent else f"{target}.{leaf}", part, weight)
