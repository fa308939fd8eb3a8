"""Gemma 4 in numbers: layers with a window have other heads than those that see every token, from config.json alone.

Read by `quire plan` and by the model itself, so that both mean the same layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from quire.errors import ModelError

MIXED_MODEL_TYPES = ("gemma4", "gemma4_text")
SLIDING, FULL = "sliding_attention", "full_attention"
# every so many layers one sees all tokens, where layer_types says nothing
_PERIOD = 6
_LAYER_INPUT_SIZE = 256
_DEFAULTS = {
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "vocab_size_per_layer_input": 262_144,
}


@dataclass(frozen=True)
class MixedLayer:
    """One layer's attention. With `source` it reads the keys and values of that layer and keeps none."""

    num_kv_heads: int
    head_dim: int
    # tokens that a token sees, 0: all
    window: int
    # values are made of the keys' projection
    has_one_projection: bool
    intermediate_size: int
    source: int | None = None

    @property
    def num_rows(self) -> int:
        """Keys and values that it keeps of a token."""
        return 0 if self.source is not None else 2 * self.num_kv_heads


@dataclass(frozen=True)
class MixedShape:
    """All layers, and the embeddings that each of them gets of its own (size 0: none)."""

    layers: tuple[MixedLayer, ...]
    num_heads: int
    hidden_size: int
    layer_input_size: int
    layer_input_vocab: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> MixedShape | None:
        """None for models whose layers are alike. ModelError for keys that contradict each other."""
        if config.get("model_type") not in MIXED_MODEL_TYPES:
            return None
        layer_input_size = config.get("hidden_size_per_layer_input", _LAYER_INPUT_SIZE) or 0
        config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
        for key in _DEFAULTS:
            if type(config[key]) is not int or config[key] < 1:
                raise ModelError(f"config.json: {key}={str(config[key])[:40]}: must be a whole number greater than 0.")
        return cls(
            layers=tuple(_layers(config)),
            num_heads=config["num_attention_heads"],
            hidden_size=config["hidden_size"],
            layer_input_size=layer_input_size,
            layer_input_vocab=config["vocab_size_per_layer_input"],
        )

    def kept_bytes(self, num_tokens: int, bytes_per_number: int, bytes_per_row: int) -> int:
        """Of a sequence of this length; a row is a key or a value of one head."""
        return sum(
            layer.num_rows
            * (layer.head_dim * bytes_per_number + bytes_per_row)
            * min(layer.window or num_tokens, num_tokens)
            for layer in self.layers
        )

    def of_rank(self, num_ranks: int) -> MixedShape:
        """The part of one of these that share each layer."""
        layers = tuple(
            replace(
                layer,
                num_kv_heads=-(-layer.num_kv_heads // num_ranks),
                intermediate_size=-(-layer.intermediate_size // num_ranks),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, num_heads=-(-self.num_heads // num_ranks))

    @property
    def reason_not_to_divide(self) -> str | None:
        """Why its layers cannot be the stages of a pipeline; None: they stand by themselves."""
        if self.layer_input_size:
            return "each takes an input of its own, made of the tokens before the first one"
        if any(layer.source is not None for layer in self.layers):
            return "some read keys and values that others have made"
        return None

    def of_stage(self, num_stages: int) -> MixedShape:
        """The part of the stage that has most of it."""
        share, more = divmod(len(self.layers), num_stages)
        bounds = pairwise(accumulate((share + (stage < more) for stage in range(num_stages)), initial=0))
        parts = [replace(self, layers=self.layers[first:last]) for first, last in bounds]
        return max(parts, key=lambda part: part.num_linear_parameters)

    @property
    def query_width(self) -> int:
        """Of all layers, numbers of a token's queries."""
        return sum(self.num_heads * layer.head_dim for layer in self.layers)

    @property
    def num_linear_parameters(self) -> int:
        """Of the layers, without what they look up."""
        of_attention = sum(self.hidden_size * self._projected(layer) for layer in self.layers)
        of_mlp = sum(3 * self.hidden_size * layer.intermediate_size for layer in self.layers)
        # the projection of hidden states to all layers' inputs, and in each layer one in and one out
        return of_attention + of_mlp + 3 * self.hidden_size * self.layer_input_size * len(self.layers)

    @property
    def num_looked_up_parameters(self) -> int:
        """Of the table that has a row for each token and layer."""
        return self.layer_input_vocab * self.layer_input_size * len(self.layers)

    def _projected(self, layer: MixedLayer) -> int:
        num_kept = 0 if layer.source is not None else 1 if layer.has_one_projection else 2
        return layer.head_dim * (2 * self.num_heads + num_kept * layer.num_kv_heads)


def _layers(config: dict[str, Any]) -> Iterator[MixedLayer]:
    kinds = _kinds(config)
    num_own = len(kinds) - config.get("num_kv_shared_layers", 0)
    shares_projection = config.get("attention_k_eq_v", False)
    for index, kind in enumerate(kinds):
        is_full = kind == FULL
        num_kv_heads, head_dim = _heads(config, index, is_full)
        if config["num_attention_heads"] % num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads={config['num_attention_heads']} is no multiple of the "
                f"{num_kv_heads} heads of keys that layer {index} has. Take the config.json that belongs to the "
                "weights."
            )
        is_wide = index >= num_own and config.get("use_double_wide_mlp", False)
        yield MixedLayer(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=0 if is_full else config["sliding_window"],
            has_one_projection=is_full and shares_projection,
            intermediate_size=config["intermediate_size"] * (2 if is_wide else 1),
            source=None if index < num_own else _last(kinds[:num_own], kind, index),
        )


def _kinds(config: dict[str, Any]) -> list[str]:
    """What each layer sees; the last one sees all tokens, whatever the file says."""
    num_layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [FULL if (index + 1) % _PERIOD == 0 else SLIDING for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {SLIDING, FULL}:
        raise ModelError(
            f"config.json: layer_types={str(kinds)[:80]}: must be {SLIDING} or {FULL} for each of the {num_layers} "
            "layers. Take the config.json that belongs to the weights."
        )
    return [*kinds[:-1], FULL]


def _heads(config: dict[str, Any], index: int, is_full: bool) -> tuple[int, int]:
    """Heads of keys and their size. A list of layers that differ (per_layer_config) wins over numbers for a kind."""
    num_kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    by_layer = config.get("per_layer_config")
    if isinstance(by_layer, dict):
        own = by_layer.get(str(index)) or {}
        unknown = set(own) - {"num_key_value_heads", "head_dim"}
        if unknown:
            raise ModelError(
                f"config.json: per_layer_config: layer {index} has {', '.join(sorted(unknown))} of its own: only "
                "num_key_value_heads and head_dim are built."
            )
        return own.get("num_key_value_heads", num_kv_heads), own.get("head_dim", head_dim)
    if not is_full:
        return num_kv_heads, head_dim
    of_full = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return of_full or num_kv_heads, config["global_head_dim"]


def _last(kinds: list[str], kind: str, index: int) -> int:
    """The last layer of a kind that keeps keys and values."""
    found = [number for number, other in enumerate(kinds) if other == kind]
    if not found:
        raise ModelError(
            f"config.json: layer {index} ({kind}) is among the last num_kv_shared_layers, which take keys and values "
            "from an earlier layer of their kind, but there is none. Take the config.json that belongs to the weights."
        )
    return found[-1]
