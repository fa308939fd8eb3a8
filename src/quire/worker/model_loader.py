"""From a Hugging Face directory, as it is, to a model that is ready to run.

Owns: the order of loading (build in the final type, fill tensor by tensor, pack, bind a backend) and the check that
every weight came once. Must never: hold the weights twice, or unpickle. Called by: `worker.py`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from quire.config import ModelFacts, WorkerConfig
from quire.errors import ModelError, QuireError, one_line
from quire.worker.attention import bind_backend
from quire.worker.checkpoint_files import CheckpointFiles
from quire.worker.dummy_weights import fill_with_random_weights
from quire.worker.layers.parameter import Part, ShapeMismatchError, load_weight, parts_of
from quire.worker.model_config import read_model_config
from quire.worker.models.checkpoint_map import CheckpointMap, Placement
from quire.worker.models.registry import find_native, native_class
from quire.worker.platforms import current_platform

_logger = logging.getLogger(__name__)
# Below this a progress bar is only noise.
_PROGRESS_BYTES = 500 * 10**6
_WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_model(config: WorkerConfig) -> nn.Module:
    """The model of `config.model_path`: on its device, weights loaded and packed, in eval mode."""
    path = Path(config.model_path)
    facts = ModelFacts.read(path)
    platform = current_platform(config.device)
    dtype = platform.dtype(config.dtype)
    _refuse_quantized(facts)
    model_class = _native_class(config, facts)
    if model_class is None:
        from quire.worker.models.transformers_fallback import load_through_transformers

        model = load_through_transformers(config, dtype, platform.device)
    else:
        with _unusable_values_named(path / "config.json", model_class):
            model_config = read_model_config(path / "config.json", facts.hf_config, model_class)
        with building(dtype, platform.device), _unusable_values_named(path / "config.json", model_class):
            model = model_class(model_config, config.max_model_len)
        if config.load_format == "dummy":
            fill_with_random_weights(model, config.seed)
        else:
            load_weights(model, CheckpointFiles(path))
    pack_weights(model)
    backend = bind_backend(model, config.attention_backend, config.block_size, platform.device.type)
    _logger.info(
        "%s runs as %s on %s with attention backend %s", facts.model_type, type(model).__name__, dtype, backend.name
    )
    return model.requires_grad_(False).eval()


@contextmanager
def _unusable_values_named(file: Path, model_class: type[Any]) -> Iterator[None]:
    """Values that no check foresaw break somewhere inside; a user gets one line, an author the place in the log."""
    try:
        yield
    except QuireError:
        raise
    except Exception as error:
        _logger.debug("%s cannot be built", model_class.__name__, exc_info=True)
        raise ModelError(
            f"{file}: {model_class.__name__} cannot be built from these values ({type(error).__name__}: "
            f"{one_line(error)}). Take the config.json that belongs to the weights; QUIRE_LOG_LEVEL=debug shows where "
            "it failed."
        ) from error


@contextmanager
def building(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Parameters that are made inside have the model's type and device from the start, and are not initialised."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def load_weights(model: nn.Module, files: CheckpointFiles) -> None:
    """Fill every parameter from the checkpoint; what is missing, left over or of a wrong shape is an error."""
    checkpoint_map: CheckpointMap = getattr(model, "checkpoint_map", CheckpointMap())
    # Tied parameters have two names here; the first is the one that counts.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first_name = {id(parameter): name for name, parameter in reversed(parameters.items())}
    waiting = {(name, part) for name in first_name.values() for part in parts_of(parameters[name])}
    unexpected: list[str] = []
    with _progress(files) as bar:
        for source, tensor in files.tensors():
            for placement in checkpoint_map.place(source, tensor):
                parameter = parameters.get(placement.name)
                if parameter is None or placement.part not in parts_of(parameter):
                    unexpected.append(source)
                    continue
                first = first_name[id(parameter)]
                # A tied head that the checkpoint holds as well says nothing new; alone, it stands for the embedding.
                if first == placement.name or (first, placement.part) in waiting:
                    _load(parameter, placement, source)
                    waiting.discard((first, placement.part))
            bar.update(tensor.nbytes)
    _check_complete(waiting, unexpected)


def _load(parameter: torch.Tensor, placement: Placement, source: str) -> None:
    if placement.tensor.dtype not in _WEIGHT_TYPES:
        raise ModelError(
            f"{source}: is stored as {placement.tensor.dtype}, so the checkpoint is quantised, which is not supported. "
            "Take the float32, bfloat16 or float16 checkpoint of the same model."
        )
    try:
        load_weight(parameter, placement.tensor, placement.part)
    except ShapeMismatchError as error:
        raise ModelError(
            f"{source}: {error}. config.json and the weights do not belong together; download the checkpoint again."
        ) from None


def _check_complete(waiting: set[tuple[str, Part]], unexpected: list[str]) -> None:
    if waiting:
        names = sorted(name if part is None else f"{name} ({part})" for name, part in waiting)
        raise ModelError(
            f"the checkpoint lacks {len(names)} of the model's weights: {_listed(names)}."
            + (f" It holds {_listed(unexpected)}, which the model does not know." if unexpected else "")
            + " Config.json and weights do not belong together, or a file is missing."
        )
    if unexpected:
        raise ModelError(
            f"the checkpoint holds {len(unexpected)} tensors that the model does not know: {_listed(unexpected)}. "
            "Config.json and weights do not belong together, or the architecture differs from Quire's: "
            "try model_impl=transformers."
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def pack_weights(model: nn.Module) -> None:
    """Let every layer that can do so replace its weight by a packed one, one layer at a time."""
    for module in model.modules():
        pack = getattr(module, "pack_weights", None)
        if pack is not None:
            pack()


def _native_class(config: WorkerConfig, facts: ModelFacts) -> type[Any] | None:
    architectures = [name for name in facts.hf_config.get("architectures") or [] if isinstance(name, str)]
    if config.model_impl == "native":
        return native_class(facts.model_type, architectures)
    if config.model_impl == "transformers":
        return None
    return find_native(facts.model_type, architectures)


def _refuse_quantized(facts: ModelFacts) -> None:
    quantization = facts.hf_config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelError(
            f"config.json: quantization_config (quant_method={method}) is not supported. "
            "Take the float32, bfloat16 or float16 checkpoint of the same model."
        )


def _progress(files: CheckpointFiles) -> Any:
    is_quiet = not sys.stderr.isatty() or files.num_bytes < _PROGRESS_BYTES
    return tqdm(total=files.num_bytes, desc="loading weights", unit="B", unit_scale=True, disable=is_quiet)
