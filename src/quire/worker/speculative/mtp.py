"""A model's own head for the token behind the next one proposes (method=mtp). Drafts as a head of Eagle does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from quire.config import ModelFacts, WorkerConfig
from quire.errors import ModelError
from quire.worker.attention import bind_backend
from quire.worker.checkpoints import open_checkpoint
from quire.worker.checkpoints.checkpoint import Checkpoint, Weight
from quire.worker.dummy_weights import fill_randomly
from quire.worker.layers.quantization import find_scheme
from quire.worker.model_config import read_model_config
from quire.worker.model_loader import building
from quire.worker.models.multi_token import MultiToken, MultiTokenHead
from quire.worker.platforms import current_platform
from quire.worker.speculative.eagle import EagleProposer
from quire.worker.speculative.eagle_head import EagleModel
from quire.worker.speculative.eagle_loader import embedding_of
from quire.worker.weight_loading import load_weights, make_weights, pack_weights


class MTPProposer(EagleProposer):
    """Runs the head over each step. Nobody looks into the model."""

    def __init__(self, config: WorkerConfig, target: nn.Module) -> None:
        self._model = load_mtp(config, target)
        self._taps = None
        self._is_on = True

    def recordable(self, target: nn.Module) -> list[nn.Module]:
        return [target]


@dataclass(frozen=True)
class _Part:
    """The tensors of a checkpoint whose names begin so."""

    whole: Checkpoint
    prefix: str
    num_bytes: int = 0

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        return ((name, weight) for name, weight in self.whole.tensors() if name.startswith(self.prefix))


def load_mtp(config: WorkerConfig, target: nn.Module) -> EagleModel:
    """The head out of the model's own checkpoint, with the model's embedding and head of tokens."""
    facts = ModelFacts.read(Path(config.model_path))
    kind: MultiToken | None = getattr(target, "multi_token", None)
    embedding = embedding_of(target)
    if kind is None or embedding is None:
        raise _unusable(facts, f"{type(target).__name__} has no head of this kind that is built")
    values = {**facts.hf_config, **(facts.hf_config.get("text_config") or {})}
    model_config = read_model_config(facts.config_file, values, type(target))
    prefix = kind.prefix(model_config)
    platform = current_platform(config.device)
    dtype = platform.dtype(config.dtype)
    with building(dtype, platform.device):
        head = MultiTokenHead(model_config, config.max_model_len, kind)
    # the layer is one of the model's, and so are its names
    head.checkpoint_map = replace(
        target.checkpoint_map,
        prefixes=kind.prefixes(model_config),
        ignored_modules=tuple(f"{prefix}{name}" for name in kind.copies),
    )
    scheme = None if config.quantization is None else find_scheme(config.quantization)
    if config.load_format == "dummy":
        make_weights(head, functools.partial(fill_randomly, seed=config.seed), scheme)
    else:
        part = _Part(open_checkpoint(facts, dtype), prefix)
        if next(part.tensors(), None) is None:
            raise _unusable(facts, f"there is no tensor {prefix}* in the checkpoint")
        load_weights(head, part, scheme)
    if kind.shares_norm:
        head.share_norm(target.get_submodule("model.norm"))
    pack_weights(head)
    bind_backend(head, config.attention_backend, config.block_size, platform.device.type, config.kv_cache_dtype)
    head.requires_grad_(False).eval()
    return EagleModel(head, embedding, target.compute_logits, facts.vocab_size, None)


def _unusable(facts: ModelFacts, reason: str) -> ModelError:
    return ModelError(f"speculative_config: method=mtp: {facts.path}: {reason}. Take another method.")
