"""A checkpoint loaded by the Transformers library, for models that have no native file.

Owns: the early refusals that config.json alone justifies, and the check that every weight came. Called by:
`transformers_fallback.py`.

Transformers maps whole files into memory while it reads them; docs/worker.md has the peak in numbers.

Longer than most: each kind of checkpoint that cannot run is refused here, in a sentence that says what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.config import ModelFacts, WorkerConfig
from quire.errors import ModelError, one_line
from quire.worker.checkpoint_files import CheckpointFiles
from quire.worker.checkpoints.pickled_files import PickledFiles
from quire.worker.dummy_weights import fill_with_random_weights
from quire.worker.models.text_tower import PREFIXES, name_in_tower
from quire.worker.models.transformers_probe import PROBE, refusal

# Kinds of layers that keep keys and values of every token (of a window), and nothing else.
_LAYER_TYPES = {"full_attention", "sliding_attention", "dense", "sparse", "moe", "mlp"}

# Decoders with an encoder of images whose positions have three dimensions; attention among tokens is causal.
IMAGE_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl")


def load_hf_model(
    config: WorkerConfig, facts: ModelFacts, dtype: torch.dtype, device: torch.device, *, is_tower: bool = False
) -> Any:
    """The model in eval mode on its device, with the probing attention; the probe must be registered."""
    hf_config = _hf_config(config, facts, is_tower=is_tower)
    with _quiet():
        if config.load_format == "dummy":
            model = _dummy(config, hf_config, dtype)
        else:
            model = _load(config, hf_config, dtype, is_tower=is_tower)
    model = model.eval().to(device)
    _freeze_long_rope(model, config.max_model_len)
    return model


def _hf_config(config: WorkerConfig, facts: ModelFacts, *, is_tower: bool) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    has_code = "AutoModelForCausalLM" in facts.hf_config.get("auto_map", {})
    uses_code = has_code and config.trust_remote_code
    if facts.model_type not in CONFIG_MAPPING and not uses_code:
        from quire.worker.models.registry import native_model_types

        advice = " It brings code of its own: trust_remote_code=true would run it." if has_code else ""
        raise ModelError(
            f"model_type={facts.model_type}: neither Quire (native: {', '.join(native_model_types())}) nor this "
            f"version of the Transformers library knows it.{advice} A newer version of Transformers may."
        )
    _refuse_encoder_decoder(facts, None if uses_code else CONFIG_MAPPING[facts.model_type])
    is_known = facts.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or facts.model_type in IMAGE_MODEL_TYPES
    if not is_known and not uses_code:
        raise ModelError(
            f"model_type={facts.model_type}: Transformers has no causal language model of this kind (encoders are not "
            f"served; of models that see images it runs {', '.join(IMAGE_MODEL_TYPES)}). Leave model_impl at auto."
        )
    try:
        if is_tower:
            values = {name: value for name, value in facts.hf_config.items() if name != "model_type"}
            hf_config = CONFIG_MAPPING[facts.model_type](**values)
        else:
            hf_config = AutoConfig.from_pretrained(facts.path, trust_remote_code=uses_code)
    except Exception as error:
        # Each configuration class checks its values in its own way.
        where = facts.path / "config.json"
        raise ModelError(f"{where}: not a valid {facts.model_type} configuration ({one_line(error)}).") from error
    _refuse_other_layers(facts.model_type, hf_config)
    return hf_config


def _refuse_encoder_decoder(facts: ModelFacts, config_class: Any) -> None:
    """By the file or by the family: a lone decoder of such a family counts its positions by itself."""
    if facts.hf_config.get("is_encoder_decoder") or getattr(config_class, "is_encoder_decoder", False):
        raise ModelError(
            f"model_type={facts.model_type}: is an encoder-decoder of a kind that Quire does not run; t5, mt5, umt5 "
            "and whisper are served. Take one of these, or a decoder-only model."
        )


def _refuse_other_layers(model_type: str, hf_config: Any) -> None:
    """By name, because some of them look like plain attention until a text is long (compressed, indexed, chunked)."""
    for config in (hf_config, hf_config.get_text_config()):
        others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
        if others:
            raise ModelError(
                f"model_type={model_type}: {refusal('it has layers of the kind ' + ', '.join(others))} "
                f"Served are {', '.join(sorted(_LAYER_TYPES))}."
            )
        if getattr(config, "index_topk", None) is not None:
            raise ModelError(f"model_type={model_type}: {refusal('an index chooses what it attends to (index_topk)')}")


def _load(config: WorkerConfig, hf_config: Any, dtype: torch.dtype, *, is_tower: bool) -> Any:
    path = Path(config.model_path)
    # Looks at every header first, so that a damaged file is named.
    is_pickled = config.load_format == "pt"
    _ = PickledFiles(path) if is_pickled else CheckpointFiles(path)
    try:
        model, report = _auto_class(hf_config).from_pretrained(
            path,
            config=hf_config,
            dtype=dtype,
            attn_implementation=PROBE,
            use_safetensors=not is_pickled,
            weights_only=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            # They are named below; otherwise a table of many lines would be printed.
            ignore_mismatched_sizes=True,
            key_mapping={f"^{re.escape(prefix)}": own for prefix, own in PREFIXES.items()} if is_tower else None,
        )
    except Exception as error:
        raise _unusable(hf_config, error) from error
    for kind in ("mismatched_keys", "missing_keys", "unexpected_keys"):
        found = report.get(kind) or ()
        if is_tower and kind == "unexpected_keys":
            found = [name for name in found if name_in_tower(name) is not None]
        names = sorted(name if isinstance(name, str) else _misfit(*name) for name in found)
        if names:
            raise ModelError(
                f"{path}: {len(names)} {kind.replace('_keys', '')} weights: {', '.join(names[:5])}. "
                "Config.json and weights do not belong together, or a file is missing."
            )
    return model


def _auto_class(hf_config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hf_config.model_type in IMAGE_MODEL_TYPES else AutoModelForCausalLM


def _misfit(name: str, stored: Any, wanted: Any) -> str:
    return f"{name} ({list(stored)} in the checkpoint, {list(wanted)} in the model)"


def _dummy(config: WorkerConfig, hf_config: Any, dtype: torch.dtype) -> Any:
    try:
        model = _auto_class(hf_config).from_config(
            hf_config, dtype=dtype, attn_implementation=PROBE, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:
        raise _unusable(hf_config, error) from error
    fill_with_random_weights(model, config.seed)
    return model


def _unusable(hf_config: Any, error: Exception) -> ModelError:
    if isinstance(error, ModelError):
        return error
    if isinstance(error, KeyError) and PROBE in error.args:
        return ModelError(f"model_type={hf_config.model_type}: {refusal('it does not use the attention interface')}")
    return ModelError(
        f"model_type={hf_config.model_type}: Transformers cannot load it with Quire's attention "
        f"({type(error).__name__}: {one_line(error)})."
    )


def _freeze_long_rope(hf_model: nn.Module, max_model_len: int) -> None:
    """longrope has two sets of angles and chooses by the longest sequence of a batch. Keys in a cache cannot follow
    such a choice, so it is made once, by max_model_len."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in hf_model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and "longrope" in kind.values():
            raise refusal("its longrope differs by kind of layer")
        if kind != "longrope":
            continue
        original = module.config.rope_parameters["original_max_position_embeddings"]
        chosen = module.original_inv_freq
        if max_model_len > original:
            chosen, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, chosen.device, seq_len=original + 1)
        module.inv_freq.copy_(chosen)
        module.original_inv_freq = chosen
        module.long_inv_freq = chosen


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers' own progress bars and reports would mix with ours; what they say becomes a ModelError."""
    from transformers.utils import logging

    was_enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_enabled:
            logging.enable_progress_bar()
