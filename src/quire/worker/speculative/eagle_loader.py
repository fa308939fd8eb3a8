"""From the directory of an Eagle head to a model on top of a target. Called by `eagle.py`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.config import ModelFacts, WorkerConfig
from quire.config.model_numbers import check_numbers
from quire.errors import ModelError
from quire.json_files import read_object
from quire.worker.attention import bind_backend
from quire.worker.checkpoint_files import CheckpointFiles
from quire.worker.layers import VocabEmbedding
from quire.worker.model_config import read_model_config
from quire.worker.model_loader import building
from quire.worker.models.llama import LlamaDecoderLayer
from quire.worker.models.stages import StagedForward, sum_of_branches
from quire.worker.platforms import current_platform
from quire.worker.speculative.eagle_head import (
    EMBEDDING,
    NUM_TAPS,
    TO_TARGET,
    Eagle3Head,
    EagleHead,
    EagleModel,
    canonical_name,
    is_third_generation,
)
from quire.worker.weight_loading import load_weights, pack_weights

# Keys of config.json under which layers of the target are named whose outputs are taken.
_TAP_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


class Taps:
    """Keeps what goes into a few layers of the target, from a step's forward to its end."""

    def __init__(self, layers: nn.ModuleList, indices: Sequence[int]) -> None:
        self._taken: dict[int, Tensor] = {}
        self._indices = indices
        for index in indices:
            layers[index].register_forward_pre_hook(functools.partial(self._keep, index))

    def _keep(self, index: int, layer: nn.Module, arguments: tuple[Tensor, Tensor, Tensor | None]) -> None:
        _, hidden, residual = arguments
        self._taken[index] = sum_of_branches(hidden, residual)

    def take(self) -> Tensor:
        """States of the tokens of the last forward, side by side, [T, layers * hidden_size]."""
        hidden_TE = torch.cat([self._taken[index] for index in self._indices], dim=-1)
        self._taken.clear()
        return hidden_TE


class StageTaps:
    """The same of the last stage of a pipeline: some of them come from the stages before."""

    def __init__(self, forward: StagedForward, indices: Sequence[int]) -> None:
        self._forward = forward
        self._indices = indices

    def take(self) -> Tensor:
        return torch.cat([self._forward.tapped[index] for index in self._indices], dim=-1)


def hand_on_taps(config: WorkerConfig, target: nn.Module) -> None:
    """Of a stage that is not the last: what the head wants of its layers goes along."""
    assert config.speculation is not None, "somebody asked for drafts"
    assert config.speculation.model_path is not None, "a head has a directory"
    path = Path(config.speculation.model_path)
    if is_third_generation([canonical_name(name) for name in CheckpointFiles(path).names]):
        _taps(config, target, _read_config(path / "config.json"), path)


def load_eagle(config: WorkerConfig, target: nn.Module) -> tuple[EagleModel, Taps | StageTaps | None]:
    """The head, with the target's embedding and head where it brings none, and taps where it wants inner states."""
    assert config.speculation is not None, "somebody asked for drafts"
    assert config.speculation.model_path is not None, "a head has a directory"
    path = Path(config.speculation.model_path)
    platform = current_platform(config.device)
    files = CheckpointFiles(path)
    names = {canonical_name(name) for name in files.names}
    few = {canonical_name(name): tensor for name, tensor in files.tensors() if canonical_name(name) in _READ_FIRST}
    embedding = embedding_of(target)
    # Most heads bring a copy of the target's embedding, a gigabyte for the large ones.
    if embedding is not None and EMBEDDING in few and _is_same(few.pop(EMBEDDING), embedding):
        names.discard(EMBEDDING)
    values = _read_config(path / "config.json")
    head_class = Eagle3Head if is_third_generation(names) else EagleHead
    head_config = read_model_config(path / "config.json", values, head_class)
    with building(platform.dtype(config.dtype), platform.device):
        head = head_class(head_config, config.max_model_len, names)
    facts = ModelFacts.read(Path(config.model_path))
    _check_width(path, head, facts)
    load_weights(head, files)
    pack_weights(head)
    bind_backend(head, config.attention_backend, config.block_size, platform.device.type, config.kv_cache_dtype)
    head.requires_grad_(False).eval()
    embedding = head.embed_tokens or embedding
    if embedding is None or embedding.size != head_config.hidden_size:
        raise _unusable(path, "brings no embedding, and the one of the model does not fit it")
    to_target = few.get(TO_TARGET)
    if to_target is not None:
        _check_targets(path, to_target, facts.vocab_size)
        to_target = to_target.to(platform.device, torch.int64)
    model = EagleModel(head, embedding, target.compute_logits, facts.vocab_size, to_target)
    return model, _taps(config, target, values, path) if isinstance(head, Eagle3Head) else None


_READ_FIRST = {EMBEDDING, TO_TARGET}


def _read_config(file: Path) -> dict[str, Any]:
    values = read_object(file, advice="An Eagle head needs its config.json.")
    # One way of publishing puts the values of the network one level deeper.
    values = {**values, **values["model"]} if isinstance(values.get("model"), dict) else values
    check_numbers(values, file)
    return values


def embedding_of(target: nn.Module) -> VocabEmbedding | None:
    """The first one of a native model is that of tokens; positions have the second, if any."""
    return next((module for module in target.modules() if isinstance(module, VocabEmbedding)), None)


def _is_same(tensor: Tensor, embedding: VocabEmbedding) -> bool:
    """Some rows at a time: those of a packed embedding are copies."""
    if tensor.shape != (embedding.num_rows, embedding.size):
        return False
    ids = torch.arange(embedding.num_rows, device=embedding.weight.device).split(4096)
    pieces = zip(ids, tensor.split(4096), strict=True)
    return all(torch.equal(piece.to(rows), rows) for rows, piece in ((embedding(own), piece) for own, piece in pieces))


def _check_width(path: Path, head: EagleHead | Eagle3Head, facts: ModelFacts) -> None:
    text_config = {**facts.hf_config, **facts.hf_config.get("text_config", {})}
    size = text_config.get("hidden_size", text_config.get("n_embd"))
    width = head.target_width // (NUM_TAPS if isinstance(head, Eagle3Head) else 1)
    if size is not None and size != width:
        raise _unusable(path, f"takes hidden states of {width} numbers, those of {facts.path} have {size}")


def _check_targets(path: Path, to_target: Tensor, vocab_size: int) -> None:
    tokens = to_target + torch.arange(len(to_target))
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise _unusable(path, f"names tokens up to {int(tokens.max())}, the vocabulary has {vocab_size}")


def _taps(config: WorkerConfig, target: nn.Module, values: dict[str, Any], path: Path) -> Taps | StageTaps:
    layers = getattr(getattr(target, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(isinstance(layer, LlamaDecoderLayer) for layer in layers):
        raise _unusable(path, f"takes states from inside the model, which {type(target).__name__} does not hand out")
    if config.compile:
        raise _unusable(
            path, "takes states from inside the model, which compiled layers (compile=True) do not hand out"
        )
    named = {**values, **(values.get("eagle_config") or {})}
    after = next((named[key] for key in _TAP_KEYS if named.get(key)), None)
    staged = target.forward if isinstance(target.forward, StagedForward) else None
    num_layers = len(layers) if staged is None else staged.num_layers
    # What goes into a layer is what came out of the one before.
    before = [2, num_layers // 2, num_layers - 3] if after is None else [index + 1 for index in after]
    if len(before) != NUM_TAPS:
        raise _unusable(path, f"takes states of {len(before)} layers, {NUM_TAPS} are expected")
    indices = [min(max(index, 0), num_layers - 1) for index in before]
    if staged is None:
        return Taps(layers, indices)
    staged.tap(indices)
    return StageTaps(staged, indices)


def _unusable(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"speculative_config: model={path}: {reason}. Take a head that was made for this model, or another method."
    )
