"""Qwen 3 VL with experts: its tower and views of images, and Qwen 3's experts in most layers of the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.model_config import Nullable
from quire.worker.models.checkpoint_map import split_experts
from quire.worker.models.qwen3_moe import experts_or_dense
from quire.worker.models.qwen3_vl import Qwen3VLForConditionalGeneration
from quire.worker.models.qwen3_vl import complete_config as complete_qwen3_vl

_NUM_EXPERTS = 60
# the version of Transformers that saves the outputs of experts first
_OUTPUTS_FIRST_SINCE = 5


def make_mlp(config: Any, index: int) -> nn.Module:
    return experts_or_dense(config, index, is_normalised=True)


def complete_config(config: Any) -> None:
    # of the whole: what the text says of itself does not count
    is_tied = config.tie_word_embeddings
    complete_qwen3_vl(config)
    config.tie_word_embeddings = is_tied
    config.mlp_only_layers = config.mlp_only_layers or []
    if config.num_experts is None:
        config.num_experts = _NUM_EXPERTS if config.num_local_experts is None else config.num_local_experts


def as_kept(config: Any) -> Callable[[str, Any], list[tuple[str, Any]]]:
    """The experts of a layer are one tensor: as published [experts, inputs, outputs], and [experts, outputs, inputs] as
    Transformers saves it since its fifth version. By their names they are the same; by config.json only one of both has
    the shape of the file, unless there are as many inputs as outputs: then the version that wrote the file tells."""
    hidden_size = config.hidden_size
    intermediate_size = config.moe_intermediate_size
    version = str(config.transformers_version or "")
    outputs_and_inputs = {
        "gate_up_proj": (2 * intermediate_size, hidden_size),
        "down_proj": (hidden_size, intermediate_size),
    }

    def convert(name: str, weight: Any) -> list[tuple[str, Any]]:
        kept = outputs_and_inputs.get(name.rpartition(".")[2])
        if isinstance(weight, Tensor) and weight.ndim == 3 and ".experts." in name and kept is not None:
            shape = tuple(weight.shape[1:])
            if shape not in (kept, kept[::-1]):
                sizes = f"hidden_size={hidden_size}, moe_intermediate_size={intermediate_size}"
                raise ModelError(
                    f"{name}: has {shape[0]} x {shape[1]} for each expert, and by config.json ({sizes}) it is "
                    f"{kept[0]} x {kept[1]}, or the other way round. Take the config.json that belongs to the weights."
                )
            if _is_as_published(name, shape, kept, version):
                weight = weight.transpose(1, 2)
        return split_experts(name, weight)

    return convert


def _is_as_published(name: str, shape: tuple[int, ...], kept: tuple[int, int], version: str) -> bool:
    if kept[0] != kept[1]:
        return shape != kept
    major = version.partition(".")[0]
    if not major.isdecimal():
        raise ModelError(
            f"{name}: has as many inputs as outputs ({kept[0]}), and config.json does not say which version of "
            "Transformers wrote it: before the fifth the inputs come first. Add transformers_version to config.json."
        )
    return int(major) < _OUTPUTS_FIRST_SINCE


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    architectures = ("Qwen3VLMoeForConditionalGeneration",)
    parts = dataclasses.replace(Qwen3VLForConditionalGeneration.parts, mlp=make_mlp)
    config_defaults = {
        **Qwen3VLForConditionalGeneration.config_defaults,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": Nullable(16),
        "head_dim": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts_per_tok": 4,
        "num_experts": None,
        # the same, as Transformers writes it since its fifth version
        "num_local_experts": None,
        # what wrote the file
        "transformers_version": None,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.checkpoint_map = dataclasses.replace(self.checkpoint_map, convert=as_kept(config), converts_quantized=True)


MODEL = Qwen3VLMoeForConditionalGeneration
