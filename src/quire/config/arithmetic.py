"""The arithmetic of chapter 2 and section 3.3: what a model weighs, what a token keeps, and what that costs in time.

Pure functions of a model's config.json and of a machine's two rates. No torch; nothing here is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quire.config.latent_shape import LatentShape
from quire.config.mixed_shape import MixedShape
from quire.config.recurrent_shape import RECURRENT_MODEL_TYPES, RecurrentShape, with_common_names
from quire.config.shape_numbers import count_of, size_of
from quire.errors import ModelError

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Codes of one byte, and of what they are multiplied with for each token and head.
_CODES = ("int8", "fp8")
SCALE_BYTES = 4
_LATENT = "the model's attention keeps latent vectors"
# what layers of attention call themselves in layer_types
_ATTENTION = ("attention", "full_attention", "sliding_attention", "chunked_attention")
# Whose formulas are others.
_OTHER_ARITHMETIC = {
    "kv_lora_rank": _LATENT,
    "attention_value_scale": "layers with a window keep more heads than those that see every token",
    **dict.fromkeys(
        ("mamba_d_state", "ssm_state_size", "state_size", "linear_num_value_heads", "conv_L_cache"),
        "the model has layers that keep a state",
    ),
}


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_k")
# the first layer that has them, and of how many layers one has
_FIRST = ("first_k_dense_replace", "moe_layer_start_index")
_STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
_ENCODERS = ("bert", "roberta", "xlm-roberta")
# Feed-forward layers of two matrices, whose inner size has the name that it has beside a gate.
_NO_GATES = (*_ENCODERS, "phi", "starcoder2", "gpt_neox", "persimmon", "nemotron", "apertus", "arcee")
# Llama 4's name for the layers without experts; its intermediate_size is that of an expert.
_DENSE_SIZE = "intermediate_size_mlp"


def has_experts(hf_config: dict[str, Any]) -> bool:
    """Whether config.json, or what it says of the text model, describes a mixture of experts."""
    inner = hf_config.get("text_config")
    parts = (hf_config, inner if isinstance(inner, dict) else {})
    return any(bool(part.get(name)) for part in parts for name in _NUM_EXPERTS)


@dataclass(frozen=True)
class ExpertShape:
    """What stands in the place of feed-forward layers in a mixture of experts."""

    # layers that have it
    num_layers: int
    num_experts: int
    # experts that compute a token
    top_k: int
    inner_size: int
    # of a feed-forward layer beside them that computes every token; 0: there is none
    shared_size: int = 0
    # of all experts, those that a worker holds; 0: all, or a part of each
    num_held: int = 0

    @classmethod
    def of(cls, config: dict[str, Any], num_layers: int) -> ExpertShape | None:
        """None for a model without experts."""
        if not has_experts(config):
            return None
        num_experts = size_of(config, *_NUM_EXPERTS)
        inner = size_of(config, "moe_intermediate_size", "intermediate_size")
        # one number, which a file may have under two names
        num_shared = max(count_of(config, name) for name in _NUM_SHARED)
        shared = count_of(config, "shared_expert_intermediate_size") or num_shared * inner
        if config.get(_DENSE_SIZE):
            # a shared expert is as large as the others
            shared = inner
        return cls(
            num_layers=sum(_has_experts(config, index) for index in range(num_layers)),
            num_experts=num_experts,
            top_k=min(num_experts, size_of(config, *_TOP_K)),
            inner_size=inner,
            shared_size=shared,
        )

    def share_asked(self, num_tokens: int) -> float:
        """The part of all experts that some token of a step asks, if tokens choose independently and evenly."""
        return 1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens


def _has_experts(config: dict[str, Any], index: int) -> bool:
    """Whether this layer has them: every one, unless config.json says something else in one of the known ways."""
    dense, sparse = config.get("mlp_only_layers"), config.get("moe_layers")
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return kinds[index : index + 1] == ["sparse"]
    if isinstance(sparse, list):
        return index in sparse
    first = max(count_of(config, name) for name in _FIRST)
    last = config.get("moe_layer_end_index")
    if index < first or (isinstance(dense, list) and index in dense):
        return False
    # -1 is that of the model
    if type(last) is int and 0 <= last < index:
        return False
    step = next((count_of(config, name) for name in _STEPS if config.get(name)), 1)
    return (index + 1) % step == 0


# Which number of config.json bounds the tokens that layers of a type keep.
_BOUNDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def _bounded_layers(config: dict[str, Any], num_layers: int) -> tuple[int, int]:
    """(layers that see so many tokens and no more, so many)."""
    types = config.get("layer_types")
    if not isinstance(types, list):
        types = _types_by_angles(config, num_layers)
    for name, bound in _BOUNDS.items():
        if name in types and config.get(bound):
            return min(types.count(name), num_layers), size_of(config, bound)
    return 0, 0


def _types_by_angles(config: dict[str, Any], num_layers: int) -> list[str]:
    """Llama 4 before it had layer_types: layers with rotary angles, 1 in its list, see chunks."""
    if not config.get("attention_chunk_size"):
        return []
    angles = config.get("no_rope_layers")
    if not (isinstance(angles, list) and angles):
        interval = count_of(config, "no_rope_layer_interval") or 4
        angles = [(index + 1) % interval for index in range(num_layers)]
    return ["chunked_attention" if has_angles else "full_attention" for has_angles in angles]


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
    experts: ExpertShape | None = None
    # layers that see so many tokens and no more
    num_windowed_layers: int = 0
    window: int = 0
    # None: every head keeps keys and values
    latent: LatentShape | None = None
    # None: the heads of all layers are alike
    mixed: MixedShape | None = None
    # layers that keep a state in the place of attention
    recurrent: RecurrentShape | None = None

    @classmethod
    def of(cls, hf_config: dict[str, Any]) -> ModelShape:
        text_config = hf_config.get("text_config")
        config = with_common_names({**hf_config, **(text_config if isinstance(text_config, dict) else {})})
        latent = LatentShape.of(config)
        _check_is_computed(config, latent)
        hidden = size_of(config, "hidden_size", "n_embd", "d_model")
        num_layers = size_of(config, "num_hidden_layers", "n_layer")
        recurrent = RecurrentShape.of(config, num_layers)
        heads = size_of(config, "num_attention_heads", "n_head")
        is_newer = "intermediate_size" in config
        model_type = config.get("model_type")
        inner = size_of(config, _DENSE_SIZE, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
        num_windowed, window = _bounded_layers(config, num_layers)
        mixed = MixedShape.of(config)
        return cls(
            num_layers=num_layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=size_of(config, "num_key_value_heads", default=heads),
            head_dim=size_of(config, "head_dim", default=max(1, hidden // heads)),
            intermediate_size=inner if recurrent is None or recurrent.has_feed_forward else 0,
            vocab_size=size_of(config, "vocab_size"),
            has_gated_mlp=is_newer and model_type not in _NO_GATES,
            has_tied_embeddings=bool(
                config.get("tie_word_embeddings", not is_newer or model_type in _ENCODERS or mixed is not None)
            ),
            experts=ExpertShape.of(config, num_layers),
            num_windowed_layers=num_windowed,
            window=window,
            latent=latent,
            mixed=mixed,
            recurrent=recurrent,
        )

    def of_worker(self, tensor: int, pipeline: int, *, has_whole_experts: bool = False) -> ModelShape:
        """The part of a worker, where `tensor` workers share each layer and the layers are divided over `pipeline`
        stages; of the worker that has most of it. `has_whole_experts`: some on each, instead of a part of all."""
        return self._of_stage(pipeline)._of_rank(tensor, has_whole_experts)

    def _of_rank(self, num_ranks: int, has_whole_experts: bool) -> ModelShape:
        """Heads, inner features and the vocabulary are shared out. Whole everywhere: a head of keys that there are too
        few of, latent vectors, routers, recurrent layers."""
        if num_ranks == 1:
            return self
        experts, mixed = self.experts, self.mixed
        parts_of_experts = 1 if has_whole_experts else num_ranks
        return replace(
            self,
            num_heads=_part(self.num_heads, num_ranks),
            num_kv_heads=_part(self.num_kv_heads, num_ranks),
            intermediate_size=_part(self.intermediate_size, num_ranks),
            vocab_size=_part(self.vocab_size, num_ranks),
            experts=experts
            and replace(
                experts,
                num_held=_part(experts.num_experts, num_ranks) if has_whole_experts else 0,
                inner_size=_part(experts.inner_size, parts_of_experts),
                shared_size=_part(experts.shared_size, num_ranks),
            ),
            mixed=mixed and mixed.of_rank(num_ranks),
        )

    def _of_stage(self, num_stages: int) -> ModelShape:
        if num_stages == 1:
            return self
        experts, recurrent, mixed = self.experts, self.recurrent, self.mixed
        if mixed is not None and mixed.reason_not_to_divide is not None:
            raise ModelError(
                f"pipeline_parallel_size={num_stages}: the layers of this model cannot be divided over so many stages: "
                f"{mixed.reason_not_to_divide}. Use tensor_parallel_size."
            )
        num_layers = _part(self.num_layers, num_stages)
        return replace(
            self,
            num_layers=num_layers,
            num_windowed_layers=self.num_windowed_layers // num_stages,
            experts=experts and replace(experts, num_layers=min(experts.num_layers, num_layers)),
            recurrent=recurrent and replace(recurrent, num_layers=recurrent.num_layers // num_stages),
            mixed=mixed and mixed.of_stage(num_stages),
            # the first stage has the embedding, the last one the head
            has_tied_embeddings=True,
        )

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - (0 if self.recurrent is None else self.recurrent.num_layers)

    @property
    def num_parameters(self) -> int:
        """Matrices of a decoder; norms and biases are left out, which is less than a part in a thousand."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.has_tied_embeddings else 2)
        embeddings += self.num_table_parameters
        latent = self.num_key_parameters + self.num_value_parameters
        return self.num_linear_parameters + self.num_float_parameters + latent + self.num_expert_parameters + embeddings

    @property
    def num_active_parameters(self) -> int:
        """Those that have a part in a token: of the experts, the ones that it asks."""
        if self.experts is None:
            return self.num_parameters
        asked = self.num_expert_parameters * self.experts.top_k // self.experts.num_experts
        return self.num_parameters - self.num_expert_parameters + asked

    @property
    def num_linear_parameters(self) -> int:
        """Of the layers, without what tokens choose from (embedding, head, experts), what stays floats, and what turns
        latent vectors."""
        if self.mixed is not None:
            return self.mixed.num_linear_parameters
        recurrent = self.recurrent
        num_queries = self.num_heads * (2 if recurrent is not None and recurrent.has_output_gate else 1)
        attention = self.hidden_size * self.head_dim * (num_queries + self.num_heads + 2 * self.num_kv_heads)
        if self.latent is not None:
            attention = self.latent.num_linear_parameters(self.hidden_size, self.num_heads)
        num_sparse = 0 if self.experts is None else self.experts.num_layers
        shared = 0 if self.experts is None else self.experts.shared_size
        mlp = self.hidden_size * (3 if self.has_gated_mlp else 2)
        return (
            self.num_attention_layers * attention
            + (0 if recurrent is None else recurrent.num_linear_parameters)
            + (self.num_layers - num_sparse) * mlp * self.intermediate_size
            + num_sparse * mlp * shared
        )

    @property
    def num_table_parameters(self) -> int:
        """Of what is looked up beside the embedding."""
        return 0 if self.mixed is None else self.mixed.num_looked_up_parameters

    @property
    def query_width(self) -> int:
        """Numbers of a token's queries, in all layers."""
        return (
            self.num_attention_layers * self.num_heads * self.head_dim if self.mixed is None else self.mixed.query_width
        )

    @property
    def num_float_parameters(self) -> int:
        """Routers, convolutions: they stay floats, whatever the other matrices become."""
        experts, recurrent = self.experts, self.recurrent
        routers = 0 if experts is None else experts.num_layers * experts.num_experts * self.hidden_size
        return routers + (0 if recurrent is None else recurrent.num_float_parameters)

    @property
    def num_key_parameters(self) -> int:
        """What turns queries to latent vectors."""
        return 0 if self.latent is None else self.num_layers * self.latent.num_key_parameters(self.num_heads)

    @property
    def num_value_parameters(self) -> int:
        """What makes values of latent vectors."""
        return 0 if self.latent is None else self.num_layers * self.latent.num_value_parameters(self.num_heads)

    @property
    def num_expert_parameters(self) -> int:
        experts = self.experts
        if experts is None:
            return 0
        num_held = experts.num_held or experts.num_experts
        return experts.num_layers * num_held * 3 * self.hidden_size * experts.inner_size

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * FLOAT_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """2.1.2: 2 x layers x KV heads x head dimension x size; of latent attention one row a layer."""
        if self.mixed is not None:
            return self.mixed.kept_bytes(1, FLOAT_BYTES.get(dtype, 1), SCALE_BYTES if dtype in _CODES else 0)
        num_rows, dim = 2 * self.num_attention_layers * self.num_kv_heads, self.head_dim
        if self.latent is not None:
            num_rows, dim = self.num_layers, self.latent.kept_values
        return num_rows * (dim + SCALE_BYTES if dtype in _CODES else dim * FLOAT_BYTES[dtype])

    def kv_bytes(self, num_tokens: int, dtype: str) -> int:
        """Of a sequence: layers with a window keep no more tokens than it has."""
        if self.mixed is not None:
            return self.mixed.kept_bytes(num_tokens, FLOAT_BYTES.get(dtype, 1), SCALE_BYTES if dtype in _CODES else 0)
        num_layers = self.num_attention_layers
        kept = num_layers * num_tokens - self.num_windowed_layers * max(0, num_tokens - self.window)
        return self.kv_bytes_per_token(dtype) * kept // max(1, num_layers)

    @property
    def state_bytes(self) -> int:
        """Of a sequence, whatever its length: what recurrent layers keep, without what the cache adds to it."""
        return 0 if self.recurrent is None else sum(self.recurrent.state_bytes)


def _part(number: int, num_parts: int) -> int:
    """The largest of equal parts."""
    return -(-number // num_parts)


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


def _check_is_computed(config: dict[str, Any], latent: LatentShape | None) -> None:
    if config.get("model_type") in RECURRENT_MODEL_TYPES:
        return
    for name, what in _OTHER_ARITHMETIC.items():
        if config.get(name) and not (what is _LATENT and latent is not None):
            raise _not_computed(name, config[name], what)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    for kind in kinds if isinstance(kinds, list) else ():
        if kind not in _ATTENTION:
            raise _not_computed("layer_types", kind, "the model has layers without plain attention")


def _not_computed(name: str, value: Any, what: str) -> ModelError:
    return ModelError(
        f"config.json: {name}={str(value)[:40]}: {what}, of which the size and the time cannot be computed from "
        "config.json yet. Serve it: the log of the start says what it takes."
    )
