"""`quire plan`: what a model needs and what a machine allows, from config.json alone, before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from msgspec import structs

from quire.config import EMBEDDED, EngineOptions, ModelFacts, parse_bytes
from quire.config.arithmetic import FLOAT_BYTES, SCALE_BYTES, Machine, ModelShape
from quire.config.model_source import locate
from quire.config.quantization import SCHEMES
from quire.config.weight_sizes import expert_bytes, looked_up_bytes, weight_bytes
from quire.errors import OptionError
from quire.messages import LayerSpec
from quire.state_layout import STATE_HEADER_BYTES, state_layout

_STATE_ALIGNMENT = 16
_GIB = 2**30
# exit status, for scripts
DOES_NOT_FIT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=EMBEDDED, help="directory, GGUF file or hub name (default: embedded)"
    )
    parser.add_argument("--quantization", choices=SCHEMES, help="weights as this option makes them while loading")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="type of weights and cache"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("float32", "bfloat16", "float16", "int8", "fp8"),
        help="type of the cache (default: that of the weights)",
    )
    parser.add_argument("--memory", default="16GiB", help="memory for weights and KV cache (default: 16GiB)")
    parser.add_argument("--context", type=int, default=0, help="tokens a request (default: the model's own length)")
    parser.add_argument("--bandwidth", type=float, default=35.0, help="memory bandwidth in GB/s (default: 35)")
    parser.add_argument("--tflops", type=float, default=0.4, help="matrix rate in TFLOP/s (default: 0.4)")


def run(arguments: argparse.Namespace) -> int:
    facts = ModelFacts.read(locate(arguments.model))
    if arguments.bandwidth <= 0 or arguments.tflops <= 0 or arguments.context < 0:
        raise OptionError("bandwidth and tflops must be above 0, and context at least 0.")
    machine = Machine(arguments.tflops * 1e12, arguments.bandwidth * 1e9)
    memory = parse_bytes(arguments.memory, "memory")
    context = arguments.context or facts.max_model_len or 2048
    shape = ModelShape.of(facts.hf_config)
    weights = Weights.of(facts, shape, arguments.dtype, arguments.quantization)
    kv_dtype = arguments.kv_cache_dtype or arguments.dtype
    print("\n".join(report(shape, weights, kv_dtype, machine, memory, context)))
    return 0 if memory > weights.num_bytes else DOES_NOT_FIT


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Weights:
    """All matrices in one form, and of them what a single token reads."""

    num_bytes: int
    form: str
    bytes_of_a_token: int

    @classmethod
    def of(cls, facts: ModelFacts, shape: ModelShape, dtype: str, scheme: str | None) -> Weights:
        num_bytes, form = weight_bytes(facts, shape, dtype, scheme)
        if shape.experts is None:
            return cls(num_bytes, form, num_bytes - looked_up_bytes(facts, shape, dtype))
        idle = (1 - shape.experts.share_asked(1)) * expert_bytes(facts, shape, dtype, scheme)
        return cls(num_bytes, form, int(num_bytes - idle - looked_up_bytes(facts, shape, dtype)))


def _lines_of_weights(shape: ModelShape, weights: Weights) -> list[str]:
    lines = [
        f"parameters          {shape.num_parameters / 1e9:.3f} billion, {_size(weights.num_bytes)} in {weights.form}"
    ]
    if shape.experts is not None:
        chosen = f"{shape.experts.top_k} of {shape.experts.num_experts} experts"
        lines.append(
            f"a token             {shape.num_active_parameters / 1e9:.3f} billion active parameters ({chosen}), "
            f"reads {_size(weights.bytes_of_a_token)}"
        )
    return lines


@dataclass(frozen=True)
class KeptState:
    """What the recurrent layers keep of a sequence, as it lies in blocks of the cache; a checkpoint is as large."""

    num_layers: int = 0
    num_blocks: int = 0
    num_bytes: int = 0

    @classmethod
    def of(cls, shape: ModelShape, kv_dtype: str, block_size: int = EngineOptions.block_size) -> KeptState:
        attention = _attention_specs(shape, kv_dtype)
        layout = state_layout([*attention, *_state_specs(shape)], [[layer.name for layer in attention]], block_size)
        if layout is None or shape.recurrent is None:
            return cls()
        block_bytes = layout.chunk_bytes * layout.num_places
        return cls(shape.recurrent.num_layers, layout.num_blocks, layout.num_blocks * block_bytes)

    def lines(self) -> list[str]:
        if not self.num_blocks:
            return []
        share = EngineOptions.state_checkpoint_share
        return [
            f"state               {_size(self.num_bytes)} a sequence in {self.num_layers} layers, whatever its length "
            f"({self.num_blocks:,} blocks of the cache)",
            f"checkpoints         {_size(self.num_bytes)} each, of all prompts and answers together at most {share:g} "
            "of the cache",
        ]


def _attention_specs(shape: ModelShape, kv_dtype: str) -> list[LayerSpec]:
    is_float = kv_dtype in FLOAT_BYTES
    return [
        LayerSpec(
            name=f"attention {index}",
            num_kv_heads=shape.num_kv_heads,
            key_dim=shape.head_dim,
            value_dim=shape.head_dim,
            bytes_per_element=FLOAT_BYTES.get(kv_dtype, 1),
            scale_bytes=0 if is_float else 2 * SCALE_BYTES,
        )
        for index in range(shape.num_attention_layers)
    ]


def _state_specs(shape: ModelShape) -> list[LayerSpec]:
    states = () if shape.recurrent is None else shape.recurrent.state_bytes
    empty = LayerSpec(name="", num_kv_heads=0, key_dim=0, value_dim=0, bytes_per_element=0)
    return [
        structs.replace(empty, name=f"state {index}", state_bytes=STATE_HEADER_BYTES + _rounded_up(num_bytes))
        for index, num_bytes in enumerate(states)
    ]


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // _STATE_ALIGNMENT) * _STATE_ALIGNMENT


def report(
    shape: ModelShape, weights: Weights, kv_dtype: str, machine: Machine, memory: int, context: int
) -> list[str]:
    """The plan as lines; every figure is a formula of chapter 2."""
    per_token, per_request = shape.kv_bytes_per_token(kv_dtype), shape.kv_bytes(context, kv_dtype)
    state = KeptState.of(shape, kv_dtype)
    left = memory - weights.num_bytes
    lines = [
        *_lines_of_weights(shape, weights),
        f"KV cache            {per_token:,} bytes a token as {kv_dtype}; "
        f"{per_request / _GIB:.3f} GiB for {context:,} tokens",
        *state.lines(),
    ]
    if left <= 0:
        return [*lines, f"does not fit        {memory / _GIB:.2f} GiB is less than the weights alone need"]
    floor = machine.weight_floor_seconds(weights.bytes_of_a_token)
    # a state is read and written in each step
    cache_seconds = machine.kv_read_seconds(per_request + 2 * shape.state_bytes)
    # a step of many tokens reads all experts, and multiplies each token with those that it asks
    bound = machine.compute_bound_batch(weights.num_bytes / shape.num_active_parameters)
    num_tokens = f"{max(0, left - state.num_bytes) // per_token:,} tokens" if per_token else "any number of tokens"
    return [
        *lines,
        f"fits                {num_tokens} beside the weights in {memory / _GIB:.2f} GiB, "
        f"which is {left / (per_request + state.num_bytes):.1f} requests of {context:,}",
        f"one step            at least {floor * 1e3:.2f} ms to read the weights: {1 / floor:.1f} tokens/s alone",
        f"reading the cache   {cache_seconds * 1e3:.2f} ms a step for {context:,} tokens",
        f"arithmetic bound    from {bound:.0f} tokens a step on ({machine.ridge:.0f} operations a byte)",
    ]
