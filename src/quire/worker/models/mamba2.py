"""Mamba 2: no attention at all. A short convolution and a state space in each layer.

gate, x B C, dt = in_proj(hidden)
x, B, C         = silu(conv(x B C))
y               = scan (x, B, C; dt = softplus(dt + bias), A = -exp(A_log), D)
hidden          = out_proj(norm(y * silu(gate)))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import (
    CausalConv,
    GatedRMSNorm,
    ReplicatedLinear,
    RMSNorm,
    StateSpaceScan,
    VocabEmbedding,
)
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import CheckpointMap


@dataclass(frozen=True)
class MixerSizes:
    """What a mixer is made of, whatever a configuration calls it."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    eps: float
    bias: bool
    conv_bias: bool
    time_step_limit: tuple[float, float] = (0.0, math.inf)


class Mamba2Mixer(nn.Module):
    def __init__(self, sizes: MixerSizes, name: str) -> None:
        super().__init__()
        self.sizes = sizes
        inner = sizes.num_heads * sizes.head_dim
        groups = sizes.num_groups * sizes.state_size
        channels = inner + 2 * groups
        self.parts = [inner, channels, sizes.num_heads]
        self.channels = [inner, groups, groups]
        self.in_proj = ReplicatedLinear(sizes.hidden_size, sum(self.parts), bias=sizes.bias)
        self.conv1d = CausalConv(
            channels, sizes.kernel_size, name=f"{name}.conv", bias=sizes.conv_bias, activation="silu"
        )
        self.scan = StateSpaceScan(
            sizes.num_heads, sizes.head_dim, sizes.state_size, name=f"{name}.scan", limits=sizes.time_step_limit
        )
        self.norm = GatedRMSNorm(inner, sizes.eps, gates_first=True, num_groups=sizes.num_groups)
        self.out_proj = ReplicatedLinear(inner, sizes.hidden_size, bias=sizes.bias)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        sizes = self.sizes
        gate, mixed, dt_TH = self.in_proj(hidden).split(self.parts, dim=-1)
        x, b, c = self.conv1d(mixed).split(self.channels, dim=-1)
        y_THP = self.scan(
            x.unflatten(-1, (sizes.num_heads, sizes.head_dim)),
            dt_TH,
            b.unflatten(-1, (sizes.num_groups, sizes.state_size)),
            c.unflatten(-1, (sizes.num_groups, sizes.state_size)),
        )
        return self.out_proj(self.norm(y_THP.flatten(1), gate))


class Mamba2Block(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
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
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = Mamba2Mixer(sizes, f"model.layers.{index}.mixer")

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        # the sum over layers may be float32 where the model's type is a shorter one
        return hidden + self.mixer(positions, self.norm(hidden.to(self.norm.weight.dtype)))


class Mamba2Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embeddings = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Mamba2Block(config, index) for index in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.sums_in_float32 = config.residual_in_fp32

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None) -> Tensor:
        hidden = self.embeddings(input_ids) if input_embeds is None else input_embeds
        dtype = hidden.dtype
        if self.sums_in_float32:
            hidden = hidden.float()
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return self.norm_f(hidden.to(dtype))


def complete_time_step_limit(config: Any) -> None:
    """JSON has no infinity: Transformers writes one as a word."""
    limit = config.time_step_limit
    if limit is None:
        config.time_step_limit = (0.0, math.inf)
        return
    try:
        least, most = (float(value["__float__"] if isinstance(value, dict) else value) for value in limit)
        is_range = not isinstance(limit, str) and 0 <= least <= most
    except (TypeError, ValueError, KeyError, OverflowError):
        is_range = False
    if not is_range:
        raise ModelError(
            f"config.json: time_step_limit={str(limit)[:40]}: must be two numbers, the least step and the longest, "
            "because every step is held between them. Take the config.json that belongs to the weights."
        )
    config.time_step_limit = [least, most]


def check_groups(num_heads: int, num_groups: int, names: str) -> None:
    if num_groups < 1 or num_heads % num_groups:
        raise ModelError(
            f"config.json: {names}={num_heads}, {num_groups}: the first must be a multiple of the second. "
            "Take the config.json that belongs to the weights."
        )


def complete_config(config: Any) -> None:
    complete_time_step_limit(config)
    check_groups(config.num_heads, config.n_groups, "num_heads, n_groups")


class Mamba2ForCausalLM(CausalLM):
    architectures = ("Mamba2ForCausalLM",)
    checkpoint_map = CheckpointMap(
        prefixes={"backbone.embedding.": "model.embeddings.", "backbone.": "model."},
        modules={"A_log": "scan.A_log", "dt_bias": "scan.dt_bias", "D": "scan.D"},
    )
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
        model = Mamba2Model(config)
        super().__init__(model, head_of(config, model.embeddings))


MODEL = Mamba2ForCausalLM
