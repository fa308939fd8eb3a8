"""From a checkpoint, as it is, to a model that is ready to run.

Owns: the order of loading (build in the final type, fill and pack layer by layer, bind a backend). Must never: hold the
weights twice, or run what it reads. Called by: `worker.py`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quire.config import ModelFacts, WorkerConfig
from quire.config.image_sizes import JOINED, joined_tower
from quire.config.quantization import format_of
from quire.errors import ModelError, QuireError, one_line
from quire.worker.attention import bind_backend
from quire.worker.checkpoints import open_checkpoint
from quire.worker.config_keys import check_added_keys
from quire.worker.dummy_weights import fill_randomly
from quire.worker.kernels import cpu
from quire.worker.layers.quantization import Scheme, find_scheme
from quire.worker.layers.ranks import current_ranks
from quire.worker.model_config import read_model_config
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.models.registry import find_native, native_class
from quire.worker.models.stages import keep_stage
from quire.worker.models.text_tower import TextTower, map_of_tower
from quire.worker.models.transformers_checkpoint import IMAGE_MODEL_TYPES
from quire.worker.packed_store import PackedStore
from quire.worker.platforms import current_platform
from quire.worker.weight_loading import load_weights, make_weights, pack_weights

_logger = logging.getLogger(__name__)
# What PyTorch's own layers fill their parameters with when they are made.
_INITIALIZERS: frozenset[Any] = frozenset({
    nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, Tensor.fill_, Tensor.zero_,
})  # fmt: skip
# of the weights: a router, a table of positions
_SMALL_SHARE = 0.02


def load_model(config: WorkerConfig) -> nn.Module:
    """The model of `config.model_path`: on its device, weights loaded and packed, in eval mode."""
    check_laid_over(config)
    facts = ModelFacts.read(Path(config.model_path))
    platform = current_platform(config.device)
    if config.device == "cpu":
        cpu.measure(facts.num_weight_bytes)
    dtype = platform.dtype(config.dtype)
    scheme = None if config.quantization is None else find_scheme(config.quantization)
    model_class, tower = _choice(config, facts)
    if tower is not None:
        facts = tower.facts
        _logger.warning("%s.", tower.remark)
    if model_class is None:
        from quire.worker.models.transformers_fallback import load_through_transformers

        if current_ranks().size > 1:
            raise ModelError(
                f"{current_ranks().size} workers: model_type={facts.model_type} runs through the "
                "Transformers library, whose layers cannot be shared. Leave out tensor_parallel_size and its like."
            )
        _refuse_quantized(facts, f"the Transformers library under Quire's attention (model_type={facts.model_type})")
        model = load_through_transformers(config, facts, dtype, platform.device, is_tower=tower is not None)
    else:
        model = _load_native(config, facts, model_class, scheme, is_tower=tower is not None)
    pack_weights(model)
    backend = bind_backend(
        model, config.attention_backend, config.slots_per_block, platform.device.type, config.kv_cache_dtype
    )
    _logger.info(
        "%s runs as %s on %s%s with attention backend %s",
        facts.model_type,
        type(model).__name__,
        dtype,
        _form_of_weights(config, model),
        backend.name,
    )
    return model.requires_grad_(False).eval()


def check_laid_over(config: WorkerConfig) -> None:
    """OptionError: hf_overrides has a key that nobody takes."""
    if config.added_config_keys:
        facts = ModelFacts.read(Path(config.model_path))
        model_class, _ = _choice(config, facts)
        check_added_keys(config.added_config_keys, facts.hf_config, model_class)


def _form_of_weights(config: WorkerConfig, model: nn.Module) -> str:
    if config.quantization is None:
        return ""
    share = model.share_not_quantized() if isinstance(model, _PartlyQuantized) else 0.0
    if share < _SMALL_SHARE:
        return f" with weights as {config.quantization}"
    _logger.warning(
        "quantization=%s: %.0f %% of the weights stay as they are. Where Transformers runs the model its linear layers "
        "are quantized on a CPU, and experts that are stacked as in most families.",
        config.quantization,
        100 * share,
    )
    return f" with {100 * (1 - share):.0f} % of its weights as {config.quantization}"


@runtime_checkable
class _PartlyQuantized(Protocol):
    def share_not_quantized(self) -> float: ...


def _load_native(
    config: WorkerConfig, facts: ModelFacts, model_class: type[Any], scheme: Scheme | None, *, is_tower: bool
) -> nn.Module:
    platform = current_platform(config.device)
    dtype = platform.dtype(config.dtype)
    file = facts.config_file
    with _unusable_values_named(file, model_class):
        model = build_model(config, facts, model_class, dtype, platform.device)
    if is_tower:
        model.checkpoint_map = map_of_tower(getattr(model, "checkpoint_map", CheckpointMap()))
    if config.load_format == "dummy":
        make_weights(model, functools.partial(fill_randomly, seed=config.seed), scheme)
        return model
    if not getattr(model, "checkpoint_map", CheckpointMap()).takes_quantized:
        _refuse_quantized(facts, model_class.__name__)
    store = _packed_store(config, facts, dtype)
    if store is not None and store.load(model):
        return model
    load_weights(model, open_checkpoint(facts, dtype, config.load_format), scheme)
    if store is not None:
        store.save_soon(model)
    return model


def build_model(
    config: WorkerConfig, facts: ModelFacts, model_class: type[Any], dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """The model of a native file, this stage's layers of it, without weights; on `meta` a plan that takes no memory."""
    # nobody asks a backbone for tokens; a head that is tied takes no weights
    values = facts.hf_config if facts.has_head else {**facts.hf_config, "tie_word_embeddings": True}
    model_config = read_model_config(facts.config_file, values, model_class)
    with building(dtype, device):
        model: nn.Module = model_class(model_config, config.max_model_len)
    keep_stage(model, current_ranks().stages, has_embedding_at_end=_drafts_with_its_embedding(config))
    return model


def _drafts_with_its_embedding(config: WorkerConfig) -> bool:
    """A head that drafts takes the model's, where it brings none."""
    return config.speculation is not None and config.speculation.method in ("eagle", "mtp")


def plan_of_model(config: WorkerConfig) -> nn.Module | None:
    """What `load_model` fills, without memory: which parameters there are, and what goes where. None where the
    Transformers library runs the model."""
    facts = ModelFacts.read(Path(config.model_path))
    model_class, tower = _choice(config, facts)
    if model_class is None:
        return None
    dtype = current_platform(config.device).dtype(config.dtype)
    model = build_model(config, facts if tower is None else tower.facts, model_class, dtype, torch.device("meta"))
    if tower is not None:
        model.checkpoint_map = map_of_tower(getattr(model, "checkpoint_map", CheckpointMap()))
    return model


def _packed_store(config: WorkerConfig, facts: ModelFacts, dtype: torch.dtype) -> PackedStore | None:
    """Where this model's packed weights are kept, if they are."""
    if config.device != "cpu" or not config.packed_weights_cache or config.load_format == "pt" or not cpu.load():
        return None
    kernels = Path(cpu.statistics()["path"]).name
    form = f"{dtype} {config.quantization} {config.rank} {config.grid} {kernels}"
    if config.grid.pipeline > 1 and _drafts_with_its_embedding(config):
        form += " with embedding"
    try:
        return PackedStore.of(facts.path, form, config.packed_weights_cache)
    except OSError as error:
        _logger.warning("packed weights are not kept: %s", error)
        return None


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
    """Parameters that are made inside have the model's type and device from the start, and are not initialised. That is
    for this thread alone, but for the type: PyTorch has one default in a process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device, _Uninitialized():
            yield
    finally:
        torch.set_default_dtype(before)


class _Uninitialized(TorchFunctionMode):
    """Random numbers for what is read from a file would take seconds, and all the memory that a wrong config.json asks
    for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INITIALIZERS:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if isinstance(tensor, nn.Parameter):
                return tensor
        return func(*args, **kwargs)


def _choice(config: WorkerConfig, facts: ModelFacts) -> tuple[type[Any] | None, TextTower | None]:
    """The class that runs the checkpoint, None for the Transformers library; and its text model where that is all that
    is served."""
    if facts.model_type in IMAGE_MODEL_TYPES or _has_own_file(facts) or facts.path.is_file():
        return _native_class(config, facts), None
    tower = TextTower.of(facts)
    if tower is None:
        return _native_class(config, facts), None
    return _native_class(config, tower.facts), tower


def _has_own_file(facts: ModelFacts) -> bool:
    if facts.model_type in JOINED and joined_tower(facts.hf_config) is None:
        return False
    return find_native(facts.model_type, []) is not None


def _native_class(config: WorkerConfig, facts: ModelFacts) -> type[Any] | None:
    architectures = [name for name in facts.hf_config.get("architectures") or [] if isinstance(name, str)]
    if config.model_impl == "native":
        return native_class(facts.model_type, architectures)
    if config.model_impl == "transformers":
        return None
    return find_native(facts.model_type, architectures)


def _refuse_quantized(facts: ModelFacts, who: str) -> None:
    stored = format_of(facts.hf_config)
    if stored is not None:
        raise ModelError(
            f"{facts.config_file}: the checkpoint comes quantised as {stored}, which {who} cannot read. Take it as "
            "float32, bfloat16 or float16; quantization=int8 or int4 makes it small while loading."
        )
