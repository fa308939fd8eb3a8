"""From config.json's model_type to the class that runs it.

Order: another package's entry point (`quire.models`: model_type = class), then a file of this folder, then the
Transformers library with Quire's attention underneath.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from quire.errors import ModelError, suggestion

ENTRY_POINT_GROUP = "quire.models"

# Files of this folder that are no models.
_OTHER_FILES = {
    "causal_lm",
    "checkpoint_map",
    "registry",
    "stages",
    "transformers_checkpoint",
    "transformers_fallback",
    "transformers_probe",
}
_HEADS = ("ForCausalLM", "LMHeadModel")
# how the name of an architecture without a head ends
BACKBONE = "Model"


def native_model_types() -> list[str]:
    """Every model_type that has a file here or an entry point."""
    here = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])} - _OTHER_FILES
    return sorted(here | {point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def find_native(model_type: str, architectures: list[str]) -> type[Any] | None:
    """The class for a model_type, None if there is none; ModelError if the file fits but the head does not."""
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == model_type:
            loaded: type[Any] = point.load()
            return loaded
    if not re.fullmatch(r"[a-z][a-z0-9_]*", model_type) or model_type in _OTHER_FILES:
        return None
    name = f"{__package__}.{model_type}"
    if importlib.util.find_spec(name) is None:
        return None
    model: type[Any] = importlib.import_module(name).MODEL
    known = {*model.architectures, *backbones_of(model.architectures)}
    if architectures and not set(architectures) & known:
        raise ModelError(
            f"config.json: architectures={architectures}: Quire's {model_type} is {model.architectures[0]}, a language "
            "model that generates text. " + _why_not(architectures[0])
        )
    return model


def native_class(model_type: str, architectures: list[str]) -> type[Any]:
    """As `find_native`, but nothing found is an error."""
    model = find_native(model_type, architectures)
    if model is None:
        known = native_model_types()
        raise ModelError(
            f"model_impl=native: there is no native file for model_type={model_type!r}, only for {', '.join(known)}."
            f"{suggestion(model_type, known)} Use model_impl=auto to run it through the Transformers library."
        )
    return model


def backbones_of(architectures: Iterable[str]) -> set[str]:
    """What a checkpoint without a head calls itself: LlamaModel for LlamaForCausalLM."""
    return {f"{name.removesuffix(_HEADS[0])}{BACKBONE}" for name in architectures if name.endswith(_HEADS[0])}


def _why_not(architecture: str) -> str:
    if architecture.endswith(_HEADS):
        return "Try model_impl=transformers."
    return f"{architecture} has another kind of head, or none: classification and embedding models are not served."
