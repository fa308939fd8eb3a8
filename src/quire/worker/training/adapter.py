"""An adapter (LoRA) that is trained: two thin matrices for each target, in float32, and the slot that they are served
from. Written to a folder as PEFT does, which an engine loads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.errors import ModelError
from quire.json_files import read_object
from quire.worker.adapter_files import CONFIG_FILE, WEIGHTS_FILE, AdapterTargets
from quire.worker.layers.adapters import AdapterStack, LowRank
from quire.worker.layers.linear import QKVParallelLinear, ReplicatedLinear
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.training.products import LowRankMaster, stand_for

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoRA:
    """Which modules of the checkpoint get an adapter, by the ends of their names, and how wide it is."""

    rank: int = 8
    alpha: float = 16.0
    targets: Sequence[str] = TARGETS
    # A begins with random numbers, B with zeros, so that the first step is that of the model; or both with an adapter
    seed: int = 0
    folder: str | None = None

    @classmethod
    def of(cls, folder: str) -> LoRA:
        """Goes on with an adapter that was trained before."""
        values = read_object(Path(folder) / CONFIG_FILE)
        targets = values.get("target_modules")
        others = [name for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if values.get(name)]
        sizes = values.get("r"), values.get("lora_alpha")
        if others or not isinstance(targets, list) or not all(isinstance(size, int | float) for size in sizes):
            raise ModelError(
                f"{folder}: only adapters of one r and lora_alpha, with a list of target_modules, are trained further"
                f"{', not with ' + others[0] if others else ''}."
            )
        return cls(rank=values["r"], alpha=values["lora_alpha"], targets=targets, folder=folder)


@dataclass(frozen=True)
class _Part:
    """One target: its name in the checkpoint, and the neighbouring parts of a layer of the model that it is."""

    module: str
    numbers: list[int]
    master: LowRankMaster


class TrainedAdapter:
    """The only one of its model, in slot 0."""

    def __init__(self, model: nn.Module, lora: LoRA, names: Iterator[str], dtype: torch.dtype) -> None:
        """`names`: of the checkpoint's tensors."""
        self.lora = lora
        self._dtype = dtype
        targets = AdapterTargets.of(model, lora.rank, dtype)
        checkpoint_map: CheckpointMap = getattr(model, "checkpoint_map", CheckpointMap())
        generator = torch.Generator().manual_seed(lora.seed)
        self._parts: dict[str, list[_Part]] = {}
        # ends of names of all modules that could be trained, and of those that cannot
        known: set[str] = set()
        fused: set[str] = set()
        for name in sorted(names):
            module = name.removesuffix(".weight")
            end = module.rpartition(".")[2]
            if module == name:
                continue
            places = _places(name, checkpoint_map)
            if places is None:
                fused.add(end)
                continue
            for layer_name, parts in places.items():
                if layer_name not in targets.layers:
                    continue
                known.add(end)
                if end in lora.targets:
                    layer, _ = targets.layers[layer_name]
                    self._parts.setdefault(layer_name, []).append(_part(module, layer, parts, lora, generator))
        unable = sorted(fused.intersection(lora.targets))
        if unable or not self._parts:
            wrong = (
                f"{', '.join(unable)} holds the rows of several layers in turn, over which no adapter is trained"
                if unable
                else f"the model has no linear layer named {', '.join(lora.targets)} that takes adapters"
            )
            raise ModelError(f"lora: {wrong}. Choose targets among {', '.join(sorted(known))}.")
        self._stacks: dict[str, AdapterStack] = {name: targets.layers[name][1] for name in self._parts}
        for name, stack in self._stacks.items():
            stand_for(stack.slots, partial(list, [part.master for part in self._parts[name]]))
        if lora.folder is not None:
            self.load(Path(lora.folder))
        self.pack()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """With the names that PEFT gives them in a file."""
        for parts in self._parts.values():
            for part in parts:
                key = f"base_model.model.{part.module}"
                yield f"{key}.lora_A.weight", part.master.a
                yield f"{key}.lora_B.weight", part.master.b

    @torch.no_grad()
    def pack(self) -> int:
        """Into the slot, rounded as an engine rounds what it reads from a file."""
        for name, stack in self._stacks.items():
            pieces: dict[int, LowRank] = {}
            for part in self._parts[name]:
                a, b = part.master.a.to(self._dtype), (part.master.b * part.master.scale).to(self._dtype)
                rows = b.split([stack.parts[number] for number in part.numbers])
                pieces |= {number: LowRank(a, own) for number, own in zip(part.numbers, rows, strict=True)}
            stack.fill(0, stack.pack(pieces))
        return len(self._stacks)

    def save(self, folder: Path) -> None:
        """As PEFT would. Each file is whole at any time: who reads meanwhile gets the one before."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA",
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "target_modules": sorted(
                {part.module.rpartition(".")[2] for parts in self._parts.values() for part in parts}
            ),
        }
        unfinished = folder / f".{WEIGHTS_FILE}.part"
        save_file({name: tensor.detach().contiguous() for name, tensor in self.named()}, unfinished)
        unfinished.replace(folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """What `save` has written."""
        stored = load_file(folder / WEIGHTS_FILE)
        own = dict(self.named())
        if {name: tensor.shape for name, tensor in stored.items()} != {name: one.shape for name, one in own.items()}:
            raise ModelError(f"{folder}: holds other modules or sizes than are trained. Give lora its targets.")
        for name, parameter in own.items():
            parameter.copy_(stored[name])
        self.pack()


def _places(name: str, checkpoint_map: CheckpointMap) -> dict[str, list[object]] | None:
    """The layers that a tensor of the checkpoint is part of, and which parts of each. None: what takes it apart wants
    its rows."""
    places: dict[str, list[object]] = {}
    try:
        for placed, part, _ in checkpoint_map.place(name, torch.empty(0, 0)):
            places.setdefault(placed.removesuffix(".weight"), []).append(part)
    except ModelError:
        return None
    return places


def _part(module: str, layer: ReplicatedLinear, parts: list[Any], lora: LoRA, generator: torch.Generator) -> _Part:
    numbers = [layer.parts.index(part) if isinstance(layer, QKVParallelLinear) else (part or 0) for part in parts]
    ends = list(accumulate(layer.part_sizes))
    outputs = slice(ends[numbers[0]] - layer.part_sizes[numbers[0]], ends[numbers[-1]])
    a: Tensor = torch.empty(lora.rank, layer.in_features)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    b = torch.zeros(outputs.stop - outputs.start, lora.rank)
    return _Part(module, numbers, LowRankMaster(nn.Parameter(a), nn.Parameter(b), lora.alpha / lora.rank, outputs))
