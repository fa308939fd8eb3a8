"""Rotary position embedding: angles by position, from what config.json says.

Reads `rope_parameters` (Transformers 5) or `rope_theta` and `rope_scaling` (4). Each kind is a function from the
parameters to frequencies; the table of cosines and sines is float32 and made once per model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker import kernels
from quire.worker.forward_context import is_traced
from quire.worker.kernels import reference


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their positions, up to `max_model_len`."""

    cos_sin_cache: Tensor

    def __init__(
        self, frequencies: Tensor, max_model_len: int, scale: float = 1.0, *, is_interleaved: bool = False
    ) -> None:
        """`is_interleaved`: dimension 2 i turns with 2 i + 1, not i with i + half."""
        super().__init__()
        self.is_interleaved = is_interleaved
        positions = torch.arange(max_model_len, dtype=torch.float32, device=frequencies.device)
        angles = torch.outer(positions, frequencies)
        cache = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)
        self.register_buffer("cos_sin_cache", cache.to(torch.get_default_device()), persistent=False)

    @classmethod
    def from_config(cls, config: Any, max_model_len: int, *, is_interleaved: bool = False) -> RotaryEmbedding:
        parameters = rope_parameters(config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        kind = parameters["rope_type"]
        if kind == "proportional":
            # every dimension has an angle, but most angles are 0
            rotary_dim = head_dim
        if kind not in _KINDS:
            raise ModelError(
                f"config.json: rope_type={kind!r} is not among {', '.join(_KINDS)}. Try model_impl=transformers."
            )
        longest = getattr(config, "max_position_embeddings", None) or max_model_len
        # beside the others, as Phi has it, it wins
        original = getattr(config, "original_max_position_embeddings", None)
        if original is not None:
            parameters["original_max_position_embeddings"] = original
        parameters.setdefault("original_max_position_embeddings", longest)
        if kind in ("yarn", "longrope"):
            parameters.setdefault("factor", longest / parameters["original_max_position_embeddings"])
        if kind == "dynamic" and max_model_len > longest:
            raise ModelError(
                f"max_model_len={max_model_len}: rope_type=dynamic changes all angles beyond {longest} tokens, which "
                f"keys in the cache cannot follow. Lower max_model_len to {longest}."
            )
        # keys in a cache cannot follow a sequence that grows from short to long, so the choice is made once
        parameters["is_long"] = max_model_len > parameters["original_max_position_embeddings"]
        try:
            frequencies, scale = _KINDS[kind](parameters, rotary_dim)
        except KeyError as error:
            raise ModelError(f"config.json: rope_type={kind} needs {error.args[0]} beside it.") from None
        return cls(frequencies, max_model_len, scale, is_interleaved=is_interleaved)

    def forward(self, positions_T: Tensor, query_TF: Tensor, key_TF: Tensor | None, head_dim: int) -> None:
        """In place, on flattened heads. None: queries alone."""
        self._turn(positions_T, query_TF, key_TF, head_dim, self.cos_sin_cache)

    def _turn(
        self, lines_T: Tensor, query_TF: Tensor, key_TF: Tensor | None, head_dim: int, cos_sin_cache: Tensor
    ) -> None:
        """By the angles of a line of the table for each token."""
        source = reference if is_traced() else kernels
        num_tokens = query_TF.shape[0]
        query_THD = query_TF.view(num_tokens, -1, head_dim)
        key_TKD = query_THD[:, :0] if key_TF is None else key_TF.view(num_tokens, -1, head_dim)
        source.rotary_embedding(lines_T, query_THD, key_TKD, cos_sin_cache, self.is_interleaved)


class NoPositions(nn.Module):
    """In the place of a rotary embedding, where something else knows the order of tokens."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor, head_dim: int) -> None:
        """Leave both as they are."""


def rotary_of_layers(
    config: Any,
    max_model_len: int,
    rotary_class: type[RotaryEmbedding] = RotaryEmbedding,
    *,
    is_interleaved: bool = False,
) -> list[RotaryEmbedding]:
    """One for each layer. They share it, or those of a kind do where `rope_parameters` is by the kinds of layers."""
    by_kind = getattr(config, "rope_parameters", None) or {}
    is_by_kind = any(isinstance(parameters, dict) for parameters in by_kind.values())
    kinds = (getattr(config, "layer_types", None) or []) if is_by_kind else []
    if not kinds or not all(isinstance(by_kind.get(kind), dict) for kind in kinds):
        rotary = rotary_class.from_config(config, max_model_len, is_interleaved=is_interleaved)
        return [rotary] * config.num_hidden_layers
    made = {
        kind: rotary_class.from_config(_of_kind(config, kind), max_model_len, is_interleaved=is_interleaved)
        for kind in sorted(set(kinds))
    }
    return [made[kind] for kind in kinds]


def _of_kind(config: Any, kind: str) -> SimpleNamespace:
    """What the angles of a kind of layer are made of."""
    return SimpleNamespace(
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rope_parameters=config.rope_parameters[kind],
        max_position_embeddings=config.max_position_embeddings,
    )


def parameters_by_kind(config: Any, thetas: Mapping[str, float], full: str) -> dict[str, dict[str, Any]]:
    """`rope_parameters` by kinds of layers. In the older spelling `rope_scaling` is that of `full`, the layers which
    see everything."""
    given = getattr(config, "rope_parameters", None) or {}
    older = getattr(config, "rope_scaling", None) or {}
    parameters = {
        kind: {"rope_type": "default", "rope_theta": theta, **(given.get(kind) or {})} for kind, theta in thetas.items()
    }
    parameters[full].update(older)
    return parameters


def rope_parameters(config: Any) -> dict[str, Any]:
    """The parameters in the newer spelling, as a copy: rope_type and rope_theta are always there."""
    # As in Transformers, the older spelling wins where a file has both.
    parameters = dict(getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ModelError(
            "config.json: rope_parameters differ by kind of layer, which this model's file does not expect. "
            "Try model_impl=transformers."
        )
    kind = parameters.pop("type", None)
    parameters.setdefault("rope_type", kind or "default")
    parameters.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10_000.0)
    parameters.setdefault("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return {name: value for name, value in parameters.items() if value is not None}


def _inverse_powers(parameters: dict[str, Any], dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return 1.0 / (parameters["rope_theta"] ** exponents)


def _default(parameters: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    return _inverse_powers(parameters, dim), 1.0


def _linear(parameters: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    return _inverse_powers(parameters, dim) / parameters["factor"], 1.0


def _proportional(parameters: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """The fastest frequencies of all dimensions; the others do not turn."""
    frequencies = _inverse_powers(parameters, dim)
    frequencies[int(parameters.get("partial_rotary_factor", 1.0) * dim // 2) :] = 0.0
    return frequencies / parameters.get("factor", 1.0), 1.0


def _llama3(parameters: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """Long wavelengths are stretched, short ones kept, and those between are interpolated."""
    frequencies = _inverse_powers(parameters, dim)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * keep + frequencies / parameters["factor"] * (1 - keep), 1.0


def _yarn(parameters: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """Frequencies that turn often within the original length are kept, slow ones are stretched."""
    theta, factor = parameters["rope_theta"], parameters["factor"]
    original = parameters["original_max_position_embeddings"]

    def dimension_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_with(parameters.get("beta_fast") or 32)
    high = dimension_with(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    stretch = ramp.clamp(0, 1)
    frequencies = _inverse_powers(parameters, dim)
    return frequencies / factor * stretch + frequencies * (1 - stretch), _yarn_scale(parameters)


def _factors(parameters: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """Each frequency divided by a number of its own: GGUF has no other words for `llama3`."""
    return _divided(parameters, dim, parameters["factors"], "rope_freqs.weight"), 1.0


def _longrope(parameters: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """Such numbers for long sequences, and others for short ones."""
    name = "long_factor" if parameters["is_long"] else "short_factor"
    frequencies = _divided(parameters, dim, parameters[name], name)
    if "attention_factor" in parameters:
        return frequencies, float(parameters["attention_factor"])
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    return frequencies, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _divided(parameters: dict[str, Any], dim: int, numbers: list[float], name: str) -> Tensor:
    factors = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    if factors.shape != (dim // 2,):
        raise ModelError(f"{name}: has {len(factors)} numbers, {dim // 2} are expected.")
    return _inverse_powers(parameters, dim) / factors


def _yarn_scale(parameters: dict[str, Any]) -> float:
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])

    factor = parameters["factor"]
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return yarn_magnitude(factor, parameters["mscale"]) / yarn_magnitude(factor, parameters["mscale_all_dim"])
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, weight: float) -> float:
    """What queries and keys are multiplied by where positions are stretched: attention stays sharp."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


# Within the model's own length the dynamic kind is the default one; beyond it `from_config` refuses.
_KINDS: dict[str, Callable[[dict[str, Any], int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "factors": _factors,
    "longrope": _longrope,
}
