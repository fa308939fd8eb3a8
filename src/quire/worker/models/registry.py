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
from quire.worker.models.causal_lm import CausalLM
from quire.worker.models.sequence_classifier import classifier_names, classifier_of

ENTRY_POINT_GROUP = "quire.models"

# Files of this folder that are no models.
_OTHER_FILES = {
    "causal_lm",
    "checkpoint_map",
    "mamba2_mixer",
    "encoder",
    "encoder_decoder",
    "gemma4_tower",
    "joined_model",
    "multi_token",
    "registry",
    "sequence_classifier",
    "stages",
    "t5_layers",
    "text_tower",
    "transformers_checkpoint",
    "transformers_experts",
    "transformers_fallback",
    "transformers_probe",
    "whisper_encoder",
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
    file = model_type.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", file) or file in _OTHER_FILES:
        return None
    name = f"{__package__}.{file}"
    if importlib.util.find_spec(name) is None:
        return None
    module = importlib.import_module(name)
    model: type[Any] = module.MODEL
    known = {*model.architectures, *backbones_of(model.architectures)}
    if not architectures or set(architectures) & known:
        return model
    classifier = _classifier(module, architectures)
    if classifier is None:
        raise ModelError(
            f"config.json: architectures={architectures}: Quire's {model_type} is {model.architectures[0]}. "
            + _why_not(architectures[0])
        )
    return classifier


def _classifier(module: Any, architectures: list[str]) -> type[Any] | None:
    """The class for checkpoints with a head of labels, if these are such."""
    own: type[Any] | None = getattr(module, "CLASSIFIER", None)
    if own is not None:
        return own if set(architectures) & set(own.architectures) else None
    model: type[Any] = module.MODEL
    is_fitting = issubclass(model, CausalLM) and set(architectures) & set(classifier_names(model.architectures))
    return classifier_of(model) if is_fitting else None


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
    return f"{architecture} has a head of a kind that is not built, such as one that says something of each token."
