"""Which keys a model's configuration takes: those that are laid over config.json must be among them (`hf_overrides`).

Asked only for keys that the model's own config.json does not have: reading the Transformers library's classes takes
seconds. Called by `model_loader.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.errors import OptionError, suggestion

_logger = logging.getLogger(__name__)
_MOST_SHOWN = 80

# What is read here, or by Transformers in every class, and is no field of one.
_READ_EVERYWHERE = frozenset({
    "architectures", "attn_implementation", "auto_map", "compression_config", "dtype", "head_dim", "layer_types",
    "max_position_embeddings", "max_seq_len", "max_sequence_length", "model_type", "n_ctx", "n_positions",
    "num_labels", "num_nextn_predict_layers", "original_max_position_embeddings", "partial_rotary_factor",
    "quantization_config", "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta", "seq_length",
    "sliding_window", "text_config", "torch_dtype", "vision_config",
})  # fmt: skip


def check_added_keys(added: Sequence[str], hf_config: Mapping[str, Any], model_class: type[Any] | None) -> None:
    """`added`: each with the part in which it stands. OptionError: one is taken by nobody. Code that comes with a model
    may take others, so there it is a warning."""
    classes = list(_classes_of(hf_config))
    known = {*_READ_EVERYWHERE, *getattr(model_class, "config_defaults", {})}
    for theirs, ours in getattr(model_class, "config_names", {}).items():
        known |= {theirs, ours}
    for config_class in classes:
        known |= _keys_of(config_class)
    for key in added:
        name = key.rpartition(".")[2]
        if name in known:
            continue
        text = (
            f"hf_overrides: {key[:_MOST_SHOWN]}: neither the configuration of model_type={hf_config.get('model_type')} "
            f"nor Quire has such a key.{suggestion(name, known)}"
        )
        if classes and "auto_map" not in hf_config:
            raise OptionError(f"{text} Correct it, or leave it out.")
        _logger.warning("%s", text)


def _classes_of(hf_config: Mapping[str, Any]) -> Iterator[Any]:
    """Transformers' of the model and of its parts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for part in (hf_config, *hf_config.values()):
        model_type = part.get("model_type") if isinstance(part, Mapping) else None
        if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
            yield CONFIG_MAPPING[model_type]


def _keys_of(config_class: Any) -> set[str]:
    """What it declares, other names of the same, and what its parts have when nothing is said about them."""
    keys = {field.name for field in dataclasses.fields(config_class)} | {*config_class.attribute_map}
    try:
        waiting = [config_class().to_dict()]
    except Exception:
        # it has no defaults
        return keys
    while waiting:
        values = waiting.pop()
        keys |= {key for key in values if isinstance(key, str)}
        waiting += [value for value in values.values() if isinstance(value, Mapping)]
    return keys
