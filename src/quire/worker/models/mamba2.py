"""Mamba 2: no attention at all. A short convolution and a state space in each layer (`mamba2_mixer.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from quire.worker.layers import RMSNorm, VocabEmbedding
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.models.mamba2_mixer import (
    SCAN_WEIGHTS,
    Mamba2Mixer,
    MixerSizes,
    check_groups,
    complete_time_step_limit,
)

BACKBONE = {"backbone.embedding.": "model.embeddings.", "backbone.": "model."}


class MambaBlock(nn.Module):
    def __init__(self, config: Any, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = mixer

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        # the sum over layers may be float32 where the model's type is a shorter one
        return hidden + self.mixer(positions, self.norm(hidden.to(self.norm.weight.dtype)))


def make_mixer(config: Any, name: str) -> nn.Module:
    sizes = MixerSizes(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_groups=config.n_groups,
        state_size=config.state_size,
        kernel_size=config.conv_kernel,
        eps=config.layer_norm_epsilon,
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
        time_step_limit=tuple(config.time_step_limit),
    )
    return Mamba2Mixer(sizes, name)


class MambaModel(nn.Module):
    def __init__(self, config: Any, layers: Iterable[nn.Module], *, sums_in_float32: bool) -> None:
        super().__init__()
        self.embeddings = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.sums_in_float32 = sums_in_float32

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.embeddings(input_ids) if input_embeds is None else input_embeds
        dtype = hidden.dtype
        if self.sums_in_float32:
            hidden = hidden.float()
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return self.norm_f(hidden.to(dtype))


def model_of(config: Any, make_mixer: Callable[[Any, str], nn.Module]) -> MambaModel:
    """`make_mixer`: of a configuration and the name of the mixer."""
    layers = (
        MambaBlock(config, make_mixer(config, f"model.layers.{index}.mixer"))
        for index in range(config.num_hidden_layers)
    )
    return MambaModel(config, layers, sums_in_float32=config.residual_in_fp32)


def complete_config(config: Any) -> None:
    complete_time_step_limit(config)
    check_groups(config.num_heads, config.n_groups, "num_heads, n_groups")


class Mamba2ForCausalLM(CausalLM):
    architectures = ("Mamba2ForCausalLM",)
    checkpoint_map = CheckpointMap(prefixes=BACKBONE, modules=SCAN_WEIGHTS)
    config_defaults = {
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "residual_in_fp32": True,
        "time_step_limit": None,
        "tie_word_embeddings": False,
    }
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = model_of(config, make_mixer)
        super().__init__(model, head_of(config, model.embeddings))


MODEL = Mamba2ForCausalLM
