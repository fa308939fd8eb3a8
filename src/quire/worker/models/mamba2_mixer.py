"""The mixer of Mamba 2, as hybrids have it, too.

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
from quire.worker.layers import CausalConv, GatedRMSNorm, ReplicatedLinear, StateSpaceScan

# checkpoints have them one module higher
SCAN_WEIGHTS = {"A_log": "scan.A_log", "dt_bias": "scan.dt_bias", "D": "scan.D"}
# what several hybrids call the parts of Llama's frame around their mixers
FRAME_MODULES = {"feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"}
# of `mixer_sizes`, where config.json does not say
MIXER_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": None,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
}
# the same of a whole model that has such mixers in Llama's frame
HYBRID_DEFAULTS = {
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    **MIXER_DEFAULTS,
}


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

    def projected(self, hidden: Tensor) -> Tensor:
        """[gate | x B C | dt]"""
        return self.in_proj(hidden)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        sizes = self.sizes
        gate, mixed, dt_TH = self.projected(hidden).split(self.parts, dim=-1)
        x, b, c = self.conv1d(mixed).split(self.channels, dim=-1)
        y_THP = self.scan(
            x.unflatten(-1, (sizes.num_heads, sizes.head_dim)),
            dt_TH,
            b.unflatten(-1, (sizes.num_groups, sizes.state_size)),
            c.unflatten(-1, (sizes.num_groups, sizes.state_size)),
        )
        return self.out_proj(self.norm(y_THP.flatten(1), gate))


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


def mixer_sizes(config: Any) -> MixerSizes:
    """As hybrids spell them."""
    return MixerSizes(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        num_groups=config.mamba_n_groups,
        state_size=config.mamba_d_state,
        kernel_size=config.mamba_d_conv,
        eps=config.rms_norm_eps,
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
        time_step_limit=config.time_step_limit,
    )


def complete_mixers(config: Any, inner: int | None = None) -> None:
    """In the spelling of hybrids: limits of a step, and the size of a head, which follows from others. `inner`: of all
    heads, where the file says it."""
    complete_time_step_limit(config)
    config.time_step_limit = tuple(config.time_step_limit)
    num_heads = config.mamba_n_heads
    inner = inner or config.mamba_expand * config.hidden_size
    if num_heads < 1 or config.mamba_d_head not in (None, "auto", inner / num_heads) or inner % num_heads:
        raise ModelError(
            f"config.json: mamba_n_heads={num_heads}, mamba_d_head={config.mamba_d_head!r}: their product must be "
            f"{inner}: mamba_expand * hidden_size, or mamba_d_ssm where there is one. Take the config.json that "
            "belongs to the weights."
        )
    config.mamba_d_head = inner // num_heads
    check_groups(num_heads, config.mamba_n_groups, "mamba_n_heads, mamba_n_groups")
    if config.hidden_act != "silu":
        raise ModelError(
            f"config.json: hidden_act={config.hidden_act!r}: must be silu, the one that the recurrent layers have. "
            "Try model_impl=transformers."
        )
