"""The arithmetic of chapter 2 and section 3.3: what a model weighs, what a token keeps, and what that costs in time.

Pure functions of a model's config.json and of a machine's two rates. No torch; nothing here is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.latent_shape import LatentShape
from quire.errors import ModelError

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Codes of one byte, and of what they are multiplied with for each token and head.
_CODES = ("int8", "fp8")
_SCALE_BYTES = 4
_EXPERTS = "the model is a mixture of experts"
_LATENT = "the model's attention keeps latent vectors"
# Whose formulas are others.
_OTHER_ARITHMETIC = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    "kv_lora_rank": _LATENT,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), "the model has layers that keep a state"),
    "linear_num_value_heads": "the model has layers that keep a state",
}


@dataclass(frozen=True)
class ModelShape:
    """The numbers that the formulas need, whatever the config calls them."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    has_gated_mlp: bool
    has_tied_embeddings: bool
    # None: every head keeps keys and values
    latent: LatentShape | None = None

    @classmethod
    def of(cls, hf_config: dict[str, Any]) -> ModelShape:
        text_config = hf_config.get("text_config")
        config = {**hf_config, **(text_config if isinstance(text_config, dict) else {})}
        latent = LatentShape.of(config)
        for name, what in _OTHER_ARITHMETIC.items():
            if config.get(name) and not (what is _LATENT and latent is not None):
                raise ModelError(
                    f"config.json: {name}={str(config[name])[:40]}: {what}, of which the size and the time cannot be "
                    "computed from config.json yet. Serve it: the log of the start says what it takes."
                )
        hidden = _size(config, "hidden_size", "n_embd", "d_model")
        heads = _size(config, "num_attention_heads", "n_head")
        is_gated = "intermediate_size" in config
        return cls(
            num_layers=_size(config, "num_hidden_layers", "n_layer"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=_size(config, "num_key_value_heads", default=heads),
            head_dim=_size(config, "head_dim", default=max(1, hidden // heads)),
            intermediate_size=_size(config, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
            vocab_size=_size(config, "vocab_size"),
            has_gated_mlp=is_gated,
            has_tied_embeddings=bool(config.get("tie_word_embeddings", not is_gated)),
            latent=latent,
        )

    @property
    def num_parameters(self) -> int:
        """Matrices of a dense decoder; norms and biases are left out, which is less than a part in a thousand."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.has_tied_embeddings else 2)
        return self.num_linear_parameters + embeddings

    @property
    def num_linear_parameters(self) -> int:
        """Of the layers alone: neither embedding nor head."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        if self.latent is not None:
            attention = self.latent.num_parameters(self.hidden_size, self.num_heads)
        mlp = self.hidden_size * self.intermediate_size * (3 if self.has_gated_mlp else 2)
        return self.num_layers * (attention + mlp)

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * FLOAT_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """2.1.2: 2 x layers x KV heads x head dimension x size; of latent attention one row a layer."""
        num_rows, dim = 2 * self.num_layers * self.num_kv_heads, self.head_dim
        if self.latent is not None:
            num_rows, dim = self.num_layers, self.latent.kept_values
        return num_rows * (dim + _SCALE_BYTES if dtype in _CODES else dim * FLOAT_BYTES[dtype])


@dataclass(frozen=True)
class Machine:
    """Two rates make a roofline (2.1.1)."""

    flops: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        """Operations per byte from which on arithmetic, not memory, is the limit."""
        return self.flops / self.bytes_per_second

    def weight_floor_seconds(self, weight_bytes: int) -> float:
        """No step is faster than reading all weights once."""
        return weight_bytes / self.bytes_per_second

    def compute_bound_batch(self, bytes_per_weight: float) -> float:
        """A matrix times b vectors does 2b operations per weight; from this b on a step is bound by arithmetic."""
        return self.ridge * bytes_per_weight / 2

    def kv_read_seconds(self, num_bytes: int) -> float:
        return num_bytes / self.bytes_per_second


def _size(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these that the config has, if it can be a size."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ModelError(f"config.json: {name}={str(value)[:40]}: must be a whole number greater than 0.")
        return value
    if default is None:
        raise ModelError(f"config.json: none of {', '.join(names)} is there, so this model's size cannot be computed.")
    return default
