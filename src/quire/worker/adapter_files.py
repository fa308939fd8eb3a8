"""An adapter's directory as the PEFT library writes it: adapter_config.json and adapter_model.safetensors.

Owns what of PEFT is understood; the rest is refused by name. Nothing is unpickled, and a tensor is read only after its
shape was found to fit the model, so that a broken file costs no memory. The model's checkpoint map says where a module
of the checkpoint has gone.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from quire.errors import ModelError, one_line
from quire.worker.layers.adapters import AdapterStack, LowRank
from quire.worker.layers.linear import QKVParallelLinear, ReplicatedLinear
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.tensor_file import DTYPES, MOST_HEADER_BYTES, TensorFile, TensorFileError, opened

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
# in a list or a pattern of the configuration: each is compared with each module
_MOST_NAMES = 4096
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.(?:default\.)?weight")
# Fields that change what an adapter means, with the values that leave it alone.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "corda_config": (None,),
    # other beginnings (PiSSA, OLoRA, LoftQ) change the model's own weights, too
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}

# by layer of the model, and by part of it
Weights = dict[str, dict[int, LowRank]]


@dataclass(frozen=True)
class AdapterTargets:
    """What a model offers: its layers that have slots, by name, and where modules of its checkpoint are."""

    layers: Mapping[str, tuple[ReplicatedLinear, AdapterStack]]
    # those and the ones that other stages of a pipeline have
    whole: Mapping[str, ReplicatedLinear]
    checkpoint_map: CheckpointMap
    max_rank: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, model: nn.Module, max_rank: int, dtype: torch.dtype, whole: Mapping[str, ReplicatedLinear] | None = None
    ) -> AdapterTargets:
        layers: dict[str, tuple[ReplicatedLinear, AdapterStack]] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, ReplicatedLinear) and isinstance(layer.adapters, AdapterStack):
                layers[name] = (layer, layer.adapters)
        if whole is None:
            whole = {name: layer for name, (layer, _) in layers.items()}
        return cls(layers, whole, getattr(model, "checkpoint_map", CheckpointMap()), max_rank, dtype)

    @property
    def most_tensors(self) -> int:
        """Twice A and B of all parts of all layers: a few strangers among them are named, a flood is not looked at."""
        return 4 * sum(len(layer.part_sizes) for layer in self.whole.values())

    @property
    def most_file_bytes(self) -> int:
        """Of all matrices in float32, and of what stands around them."""
        columns = sum(len(layer.part_sizes) * layer.whole_in_features for layer in self.whole.values())
        rows = sum(sum(layer.whole_part_sizes) for layer in self.whole.values())
        return 4 * (columns + rows) * self.max_rank + MOST_HEADER_BYTES


def read_adapter(folder: Path, targets: AdapterTargets) -> Weights:
    """All matrices, checked; ModelError says in one line what is wrong."""
    config = _read_config(folder / CONFIG_FILE)
    try:
        with opened(folder / WEIGHTS_FILE) as descriptor:
            most = targets.most_file_bytes
            if (size := os.fstat(descriptor).st_size) > most:
                raise ModelError(
                    f"{WEIGHTS_FILE}: {size:,} bytes; an adapter of this model has at most {most:,} with max_lora_rank="
                    f"{targets.max_rank}. Is it an adapter, and of this model?"
                )
            file = TensorFile(descriptor)
            weights = _Reader(file, config, targets).read()
            file.check_unchanged()
            return weights
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelError(
            f"{WEIGHTS_FILE}: is not there. Save the adapter with safetensors; .bin files are not read."
        ) from error
    except (TensorFileError, OSError, RuntimeError) as error:
        raise ModelError(f"{WEIGHTS_FILE}: cannot be read ({one_line(error)}). Copy it again.") from error


def _read_config(file: Path) -> dict[str, Any]:
    try:
        with opened(file) as descriptor:
            data = os.pread(descriptor, min(os.fstat(descriptor).st_size, _MOST_CONFIG_BYTES) + 1, 0)
        if len(data) > _MOST_CONFIG_BYTES:
            raise ModelError(f"{CONFIG_FILE}: more than {_MOST_CONFIG_BYTES:,} bytes. Take the one that PEFT wrote.")
        config = msgspec.json.decode(data)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelError(f"{CONFIG_FILE}: is not there. Name the folder of an adapter as PEFT writes it.") from error
    except OSError as error:
        raise ModelError(f"{CONFIG_FILE}: cannot be read ({error.strerror}). Name the folder of an adapter.") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{CONFIG_FILE}: is not valid JSON ({one_line(error)}).") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ModelError(f"{CONFIG_FILE}: peft_type={kind!r}: must be LORA, because other kinds are not built.")
    for name, harmless in _REFUSED.items():
        if config.get(name) not in harmless:
            raise ModelError(
                f"{CONFIG_FILE}: {name}={_short(config[name])}: is not built. Train without it, or merge the adapter "
                "into the model."
            )
    _check_numbers(config)
    return config


def _check_numbers(config: Mapping[str, Any]) -> None:
    values = {"r": config.get("r"), "lora_alpha": config.get("lora_alpha")}
    for pattern in ("rank_pattern", "alpha_pattern"):
        entries = config.get(pattern) or {}
        if not isinstance(entries, dict):
            raise ModelError(f"{CONFIG_FILE}: {pattern}={_short(entries)}: must be an object.")
        _check_number_of_names(pattern, entries)
        values |= {f"{pattern}.{key}": value for key, value in entries.items()}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise ModelError(f"{CONFIG_FILE}: {name}={_short(value)}: must be a number above 0.")
    if config.get("use_rslora") not in (None, True, False):
        raise ModelError(f"{CONFIG_FILE}: use_rslora={_short(config['use_rslora'])}: must be true or false.")


def _check_number_of_names(field: str, names: Sized) -> None:
    if len(names) > _MOST_NAMES:
        raise ModelError(
            f"{CONFIG_FILE}: {field}: {len(names):,} names, at most {_MOST_NAMES:,} are read. Name modules by the ends "
            "of their names, which all layers share."
        )


class _Reader:
    """One file."""

    def __init__(self, file: TensorFile, config: dict[str, Any], targets: AdapterTargets) -> None:
        self._file = file
        self._config = config
        self._targets = targets

    def read(self) -> Weights:
        pairs = self._pairs()
        self._check_targets(pairs)
        weights: Weights = {}
        for module, sides in pairs.items():
            self._add(weights, module, sides)
        return weights

    def _pairs(self) -> dict[str, dict[str, str]]:
        """Keys by module and side. Nothing of the tensors is read."""
        keys = self._file.names
        most = self._targets.most_tensors
        if len(keys) > most:
            raise ModelError(
                f"{WEIGHTS_FILE}: {len(keys):,} tensors; no adapter of this model has more than {most:,}. Is it one?"
            )
        pairs: dict[str, dict[str, str]] = {}
        for key in keys:
            if (match := _KEY.fullmatch(key)) is None:
                raise ModelError(
                    f"{WEIGHTS_FILE}: {_short(key)}: only lora_A and lora_B of linear layers are built. Train the "
                    "adapter without embeddings, biases, magnitudes and saved modules."
                )
            sides = pairs.setdefault(match["module"], {})
            if match["side"] in sides:
                raise ModelError(f"{WEIGHTS_FILE}: {_short(key)}: is there twice, with a prefix and without it.")
            sides[match["side"]] = key
        for module, sides in pairs.items():
            if len(sides) < 2:
                raise ModelError(f"{WEIGHTS_FILE}: {_short(module)}: has one of lora_A and lora_B; both are needed.")
        if not pairs:
            raise ModelError(f"{WEIGHTS_FILE}: holds no tensors.")
        return pairs

    def _check_targets(self, pairs: Mapping[str, Any]) -> None:
        """What the configuration names must be there; a part of a file must not pass for an adapter."""
        targets = self._config.get("target_modules")
        if isinstance(targets, str):
            # a regular expression or all-linear: what it chose is what the file has
            return
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            raise ModelError(f"{CONFIG_FILE}: target_modules={_short(targets)}: must be names or a regular expression.")
        _check_number_of_names("target_modules", targets)
        for name in targets:
            if not any(module == name or module.endswith(f".{name}") for module in pairs):
                raise ModelError(
                    f"{WEIGHTS_FILE}: has nothing for {_short(name)}, which target_modules names. Is the file whole?"
                )

    def _add(self, weights: Weights, module: str, sides: Mapping[str, str]) -> None:
        a_shape = self._shape(sides["A"])
        b_shape = self._shape(sides["B"])
        rank, scale = self._rank_and_scale(module)
        most = self._targets.max_rank
        if rank > most:
            raise ModelError(f"rank {rank} of {_short(module)}: at most {most} here. Start with max_lora_rank={rank}.")
        if a_shape[:1] != [rank] or b_shape[1:] != [rank]:
            raise ModelError(
                f"{WEIGHTS_FILE}: {_short(module)}: lora_A {a_shape} and lora_B {b_shape} do not have the rank {rank} "
                f"of {CONFIG_FILE}."
            )
        # The map is asked with a tensor that takes no memory.
        probe = torch.empty(b_shape, device="meta")
        places = self._places(module, probe)
        for layer_name, part, piece in places:
            layer = self._targets.whole[layer_name]
            inputs = layer.whole_in_features
            outputs = layer.whole_part_sizes[part] if part is not None else sum(layer.whole_part_sizes)
            if a_shape != [rank, inputs] or list(piece.shape) != [outputs, rank]:
                raise ModelError(
                    f"{WEIGHTS_FILE}: {_short(module)}: lora_A {a_shape} and lora_B {list(piece.shape)}, the model "
                    f"needs {[rank, inputs]} and {[outputs, rank]}. Is it an adapter of this model?"
                )
        if not any(layer_name in self._targets.layers for layer_name, _, _ in places):
            # another stage reads it
            return
        a = self._tensor(sides["A"])
        b = self._tensor(sides["B"], scale)
        for layer_name, part, piece in self._places(module, b):
            if layer_name not in self._targets.layers:
                continue
            layer = self._targets.whole[layer_name]
            parts = weights.setdefault(layer_name, {})
            pieces = {part: piece} if part is not None else dict(enumerate(piece.split(layer.whole_part_sizes)))
            for number, rows in pieces.items():
                if number in parts:
                    raise ModelError(
                        f"{WEIGHTS_FILE}: {_short(module)}: is the same part of the model as another module there, of "
                        "which one would be lost. Leave one of them out."
                    )
                parts[number] = LowRank(layer.inputs_of(a), layer.outputs_of(rows, number))

    def _places(self, module: str, b: Tensor) -> list[tuple[str, int | None, Tensor]]:
        """(layer, part or None for all of it, rows of b); where the checkpoint's weight is turned, so is b."""
        weight = b.t() if self._config.get("fan_in_fan_out") else b
        places: list[tuple[str, int | None, Tensor]] = []
        for name, part, piece in self._targets.checkpoint_map.place(f"{module}.weight", weight):
            layer_name = name.removesuffix(".weight")
            if layer_name not in self._targets.whole:
                raise ModelError(
                    f"{WEIGHTS_FILE}: {_short(module)}: no linear layer of this model that takes adapters (embeddings, "
                    "the head and experts do not)."
                )
            layer = self._targets.whole[layer_name]
            if isinstance(part, str) and isinstance(layer, QKVParallelLinear):
                part = layer.parts.index(part)
            assert part is None or isinstance(part, int)
            assert isinstance(piece, Tensor)
            places.append((layer_name, part, piece))
        if not places:
            raise ModelError(f"{WEIGHTS_FILE}: {_short(module)}: the model has no such weight.")
        return places

    def _rank_and_scale(self, module: str) -> tuple[int, float]:
        rank = _by_pattern(self._config.get("rank_pattern"), module, self._config["r"])
        alpha = _by_pattern(self._config.get("alpha_pattern"), module, self._config["lora_alpha"])
        if rank != int(rank):
            raise ModelError(f"{CONFIG_FILE}: r={rank}: must be a whole number.")
        return int(rank), alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _shape(self, key: str) -> list[int]:
        shape = self._file.shape(key)
        dtype = self._file.dtype(key)
        if dtype not in DTYPES or len(shape) != 2:
            raise ModelError(
                f"{WEIGHTS_FILE}: {_short(key)}: {_short(dtype)} {_short(shape)}: must be a matrix of "
                f"{', '.join(DTYPES)}."
            )
        return shape

    def _tensor(self, key: str, scale: float = 1.0) -> Tensor:
        """In the model's type."""
        # float32 holds all of DTYPES
        tensor = (self._file.tensor(key).float() * scale).to(self._targets.dtype)
        if not tensor.isfinite().all():
            raise ModelError(
                f"{WEIGHTS_FILE}: {_short(key)}: holds numbers that are not finite, or not when they are scaled and in "
                f"{str(tensor.dtype).removeprefix('torch.')}. Train it anew, or with a smaller lora_alpha."
            )
        return tensor


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """As PEFT matches: the end of a module's name, as a regular expression."""
    for pattern, value in (patterns or {}).items():
        # plain names only: an expression of a stranger could run for ever
        plain = pattern.removeprefix("^")
        if re.fullmatch(r"[\w.]+", plain) is None:
            raise ModelError(
                f"{CONFIG_FILE}: {_short(pattern)} in rank_pattern or alpha_pattern: only names of modules are built."
            )
        if module == plain or (plain == pattern and module.endswith(f".{plain}")):
            return value
    return default


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 100 else text[:97] + "..."
