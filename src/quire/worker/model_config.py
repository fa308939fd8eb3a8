"""What a model file reads: config.json as attributes, with the defaults that the model's class declares.

Owns: which value a key has. Must never: import Transformers, whose configuration classes cost two seconds of start-up.
Called by: `model_loader.py`. A model class may declare (docs/adding-a-model.md):

    config_defaults = {"hidden_size": 4096, "sliding_window": Nullable(4096)}   what config.json may leave out
    config_names = {"n_embd": "hidden_size"}                                    other names of the same keys
    def complete_config(config): ...                                            keys that follow from others
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from quire.errors import ModelError

# Counts and widths. Zero of them would be a model without weights, or a division by zero far from its cause.
_SIZES = re.compile(r"(num|n)_\w+|\w+_(size|dim)")
# What a model may have none of.
_MAY_BE_ZERO = (
    "num_nextn_predict_layers", "n_shared_experts", "num_local_experts", "num_experts_per_tok", "num_kv_shared_layers",
)  # fmt: skip
# Far above what any model has: a number that was made up must not be built, layer by layer, until memory ends.
_MOST = 2**31 - 1
_MOST_LAYERS = 10_000
_LAYERS = ("num_hidden_layers", "num_layers")


class MissingKeyError(ModelError, AttributeError):
    """A key that the model needs and nobody gave. An AttributeError too, so `getattr` with a default works."""


@dataclasses.dataclass(frozen=True)
class Nullable:
    """A default for a key that config.json may also set to null; null then stays null."""

    default: Any


class ModelConfig:
    """The keys of config.json as attributes."""

    def __init__(self, file: Path, values: dict[str, Any], names: dict[str, str]) -> None:
        self.__dict__.update({names.get(key, key): value for key, value in values.items()})
        self.__dict__["_file"] = file
        self.__dict__["_names"] = names

    def __getattr__(self, name: str) -> Any:
        """Only for what is not an attribute: another name of one, or a key that is missing."""
        key = self.__dict__.get("_names", {}).get(name, name)
        if key in self.__dict__:
            return self.__dict__[key]
        raise MissingKeyError(
            f"{self.__dict__.get('_file')}: no {key}, which this model needs and has no default for. "
            "Take the config.json that belongs to the weights."
        )


def read_model_config(file: Path, values: dict[str, Any], model_class: type[Any]) -> ModelConfig:
    """The content of config.json for a model class. One that declares nothing gets the content as it is."""
    declared: dict[str, Any] = getattr(model_class, "config_defaults", {})
    names: dict[str, str] = getattr(model_class, "config_names", {})
    # One model's changes must not reach the declaration, nor what others read from the same file.
    config = ModelConfig(file, copy.deepcopy(values), names)
    for key, default in declared.items():
        is_nullable = default is None or isinstance(default, Nullable)
        plain = default.default if isinstance(default, Nullable) else default
        value = config.__dict__.setdefault(key, copy.deepcopy(plain))
        if not (value is None and is_nullable):
            # as the file calls it
            given = next((name for name, own in names.items() if own == key and name in values), key)
            _check(file, key, given, value, plain)
    _check_layer_types(file, config)
    complete = getattr(model_class, "complete_config", None)
    if complete is not None:
        complete(config)
    return config


def _check(file: Path, key: str, given: str, value: Any, default: Any) -> None:
    """A value must be of its default's kind. A key whose default is null may hold anything, but for a size."""
    is_size = _SIZES.fullmatch(key) is not None and key not in _MAY_BE_ZERO
    if default is None and not is_size:
        return
    default = 1 if default is None else default
    allowed = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, allowed) or isinstance(value, bool) is not isinstance(default, bool):
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[type(default)]
        raise ModelError(f"{file}: {given}={value!r} must be {kind}. Take the config.json that belongs to the weights.")
    if is_size and isinstance(default, int) and not isinstance(default, bool) and value < 1:
        raise ModelError(f"{file}: {given}={value} must be at least 1. Correct config.json.")
    most = _MOST_LAYERS if key in _LAYERS else _MOST
    if isinstance(default, int) and not isinstance(default, bool) and value > most:
        raise ModelError(f"{file}: {given}={value} must be at most {most:,}. Correct config.json.")
    if isinstance(default, float) and not math.isfinite(value):
        raise ModelError(f"{file}: {given}={value} must be a finite number. Correct config.json.")
    if isinstance(default, int) and value < 0:
        raise ModelError(f"{file}: {given}={value} must not be negative. Correct config.json.")


def _check_layer_types(file: Path, config: ModelConfig) -> None:
    """Also for models whose layers are all alike: two keys that contradict each other belong to different models."""
    kinds = getattr(config, "layer_types", None)
    num_layers = getattr(config, "num_hidden_layers", None)
    if kinds is None or num_layers is None:
        return
    if not isinstance(kinds, list):
        raise ModelError(f"{file}: layer_types={kinds!r} must be a list of names, one a layer. Correct config.json.")
    if len(kinds) != num_layers:
        raise ModelError(
            f"{file}: layer_types names {len(kinds)} layers, num_hidden_layers is {num_layers}. "
            "Take the config.json that belongs to the weights."
        )
