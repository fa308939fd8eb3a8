"""Where the tensors of a checkpoint go: a table that stands at the head of each model's file.

The default is that names agree. Differences are renamed prefixes, several tensors of the checkpoint that are parts of
one parameter, tensors that mean nothing here, and layouts that must be turned first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from quire.worker.layers.parameter import Part

# What most decoders merge: three projections into one multiplication, and two.
MERGED: Mapping[str, tuple[str, Part]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class Placement(NamedTuple):
    """One tensor's way: the parameter's name, which part of it, and the tensor."""

    name: str
    part: Part
    tensor: Tensor


def _unchanged(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    return [(name, tensor)]


@dataclass(frozen=True)
class CheckpointMap:
    """The table of one architecture."""

    # module of the checkpoint -> (module of the model, part)
    merged: Mapping[str, tuple[str, Part]] = field(default_factory=dict)
    # beginning of a name -> what stands there instead; the first that fits
    prefixes: Mapping[str, str] = field(default_factory=dict)
    # ends of names that are not weights: buffers that old versions wrote
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    # a last look at a tensor: turn it, or cut it into several
    convert: Callable[[str, Tensor], list[tuple[str, Tensor]]] = _unchanged

    def place(self, name: str, tensor: Tensor) -> Iterator[Placement]:
        """Nothing for an ignored tensor, otherwise its placements."""
        if name.endswith(self.ignored):
            return
        for prefix, other in self.prefixes.items():
            if name.startswith(prefix):
                name = other + name.removeprefix(prefix)
                break
        for converted_name, converted in self.convert(name, tensor):
            yield self._merge(converted_name, converted)

    def _merge(self, name: str, tensor: Tensor) -> Placement:
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        if module not in self.merged:
            return Placement(name, None, tensor)
        target, part = self.merged[module]
        return Placement(f"{parent}.{target}.{leaf}" if parent else f"{target}.{leaf}", part, tensor)
