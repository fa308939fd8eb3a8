"""Mamba: no attention at all. A short convolution and a state of each channel in every layer.

x, gate  = in_proj(hidden)
x        = silu(conv(x))
dt, B, C = x_proj(x)
hidden   = out_proj(scan(x, dt_proj(dt), B, C) * silu(gate))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.layers import CausalConv, ReplicatedLinear, SelectiveScan, activation
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.models.mamba2 import BACKBONE, model_of
from quire.worker.models.mamba2_mixer import SCAN_WEIGHTS


@dataclass(frozen=True)
class MambaSizes:
    """What a mixer is made of, whatever a configuration calls it."""

    hidden_size: int
    inner: int
    state_size: int
    rank: int
    kernel_size: int
    bias: bool
    conv_bias: bool


class MambaMixer(nn.Module):
    """Relatives have norms between `x_proj` and the scan."""

    def __init__(self, sizes: MambaSizes, name: str) -> None:
        super().__init__()
        self.parts = [sizes.rank, sizes.state_size, sizes.state_size]
        self.in_proj = ReplicatedLinear(sizes.hidden_size, 2 * sizes.inner, bias=sizes.bias)
        self.conv1d = CausalConv(
            sizes.inner, sizes.kernel_size, name=f"{name}.conv", bias=sizes.conv_bias, activation="silu"
        )
        self.x_proj = ReplicatedLinear(sizes.inner, sum(self.parts), bias=False)
        # its bias is that of the scan
        self.dt_proj = ReplicatedLinear(sizes.rank, sizes.inner, bias=False)
        self.scan = SelectiveScan(sizes.inner, sizes.state_size, name=f"{name}.scan")
        self.silu = activation("silu")
        self.out_proj = ReplicatedLinear(sizes.inner, sizes.hidden_size, bias=sizes.bias)
        self.dt_layernorm: nn.Module = nn.Identity()
        self.b_layernorm: nn.Module = nn.Identity()
        self.c_layernorm: nn.Module = nn.Identity()

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        x, gate = self.in_proj(hidden).chunk(2, dim=-1)
        x = self.conv1d(x)
        dt, b, c = self.x_proj(x).split(self.parts, dim=-1)
        dt = self.dt_proj(self.dt_layernorm(dt))
        out = self.scan(x, dt, self.b_layernorm(b), self.c_layernorm(c))
        return self.out_proj(out * self.silu(gate))


def make_mixer(config: Any, name: str) -> MambaMixer:
    sizes = MambaSizes(
        hidden_size=config.hidden_size,
        inner=int(config.expand * config.hidden_size),
        state_size=config.state_size,
        rank=config.time_step_rank,
        kernel_size=config.conv_kernel,
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
    )
    return MambaMixer(sizes, name)


def rank_of(config: Any, name: str) -> int:
    """A number, or `auto`."""
    rank = getattr(config, name)
    if rank in ("auto", None):
        return math.ceil(config.hidden_size / 16)
    if type(rank) is not int or not 1 <= rank <= 2**16:
        raise ModelError(
            f"config.json: {name}={str(rank)[:40]}: must be auto or a whole number from 1 to {2**16:,}. Take the "
            "config.json that belongs to the weights."
        )
    return rank


def complete_config(config: Any) -> None:
    config.time_step_rank = rank_of(config, "time_step_rank")
    if config.hidden_act != "silu":
        raise ModelError(
            f"config.json: hidden_act={config.hidden_act!r}: must be silu, the one that recurrent layers have. Take "
            "the config.json that belongs to the weights."
        )


def place_bias(name: str, weight: Any) -> list[tuple[str, Any]]:
    """The bias of the step stands with the projection of it."""
    return [(name.replace(".dt_proj.bias", ".scan.dt_bias"), weight)]


DEFAULTS = {
    "vocab_size": 50_280,
    "hidden_size": 768,
    "state_size": 16,
    "num_hidden_layers": 32,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "residual_in_fp32": True,
    "time_step_rank": None,
    "tie_word_embeddings": True,
}


class MambaForCausalLM(CausalLM):
    architectures = ("MambaForCausalLM",)
    checkpoint_map = CheckpointMap(
        prefixes=BACKBONE,
        modules=SCAN_WEIGHTS,
        convert=place_bias,
        converts_quantized=True,
    )
    config_defaults = DEFAULTS
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = model_of(config, make_mixer)
        super().__init__(model, head_of(config, model.embeddings))


MODEL = MambaForCausalLM
