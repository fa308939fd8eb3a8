"""`quire plan`: what a model needs and what a machine allows, from config.json alone, before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from quire.config import EMBEDDED, ModelFacts, parse_bytes
from quire.config.arithmetic import Machine, ModelShape
from quire.config.model_source import locate
from quire.config.quantization import SCHEMES
from quire.config.weight_sizes import expert_bytes, looked_up_bytes, weight_bytes
from quire.errors import OptionError

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


def report(
    shape: ModelShape, weights: Weights, kv_dtype: str, machine: Machine, memory: int, context: int
) -> list[str]:
    """The plan as lines; every figure is a formula of chapter 2."""
    per_token, per_request = shape.kv_bytes_per_token(kv_dtype), shape.kv_bytes(context, kv_dtype)
    left = memory - weights.num_bytes
    lines = [
        *_lines_of_weights(shape, weights),
        f"KV cache            {per_token:,} bytes a token as {kv_dtype}; "
        f"{per_request / _GIB:.3f} GiB for {context:,} tokens",
    ]
    if left <= 0:
        return [*lines, f"does not fit        {memory / _GIB:.2f} GiB is less than the weights alone need"]
    floor = machine.weight_floor_seconds(weights.bytes_of_a_token)
    cache_seconds = machine.kv_read_seconds(per_request)
    # a step of many tokens reads all experts, and multiplies each token with those that it asks
    bound = machine.compute_bound_batch(weights.num_bytes / shape.num_active_parameters)
    return [
        *lines,
        f"fits                {left // per_token:,} tokens beside the weights in {memory / _GIB:.2f} GiB, "
        f"which is {left / per_request:.1f} requests of {context:,}",
        f"one step            at least {floor * 1e3:.2f} ms to read the weights: {1 / floor:.1f} tokens/s alone",
        f"reading the cache   {cache_seconds * 1e3:.2f} ms a step for {context:,} tokens",
        f"arithmetic bound    from {bound:.0f} tokens a step on ({machine.ridge:.0f} operations a byte)",
    ]
