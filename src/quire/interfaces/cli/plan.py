"""`quire plan`: what a model needs and what a machine allows, from config.json alone, before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from quire.config import EMBEDDED, EngineOptions, ModelFacts, parse_bytes
from quire.config.arithmetic import FLOAT_BYTES, SCALE_BYTES, Machine, ModelShape
from quire.config.device_sheets import DEVICE_SHEETS, device_sheet
from quire.config.memory_budget import PROGRAM_BYTES, LargestStep, MemoryBudget
from quire.config.model_source import locate
from quire.config.process_memory import process_memory
from quire.config.quantization import SCHEMES
from quire.config.weight_sizes import expert_bytes, looked_up_bytes, weight_bytes
from quire.engine_core.kv_cache_manager.capacity import bytes_on_cpu
from quire.errors import OptionError
from quire.interfaces.cli import plan_slo
from quire.messages import LayerSpec
from quire.simulation.shapes import model_folder, shape_names
from quire.state_layout import STATE_HEADER_BYTES, state_layout

_STATE_ALIGNMENT = 16
_GIB = 2**30
# of a CPU, unless something else is said
_CPU_BANDWIDTH = 35.0
_CPU_TFLOPS = 0.4
# of a device on which nothing else runs; Table 3.1 comes out with it
_MOST_OF_A_DEVICE = 0.94
_ENGINE_OPTIONS: tuple[tuple[str, int | float, str], ...] = (
    ("tensor_parallel_size", 1, "workers that share each layer"),
    ("pipeline_parallel_size", 1, "stages that the layers are divided over"),
    ("context_parallel_size", 1, "workers that share the keys and values of each sequence"),
    ("gpu_memory_utilization", EngineOptions.gpu_memory_utilization, "share of the memory that the engine may use"),
    ("max_num_batched_tokens", EngineOptions.max_num_batched_tokens, "tokens of the largest step"),
    ("max_num_seqs", EngineOptions.max_num_seqs, "sequences that sample in one step"),
)
# exit status, for scripts
DOES_NOT_FIT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=EMBEDDED,
        help="directory, GGUF file, hub name, or the name of a shape: opt-13b (default: embedded)",
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
    parser.add_argument("--device", help=f"memory and rates of its data sheet: {', '.join(DEVICE_SHEETS)}")
    parser.add_argument(
        "--memory", help="memory that all workers may use together, instead of a device's (default: this machine's)"
    )
    parser.add_argument("--context", type=int, default=0, help="tokens a request (default: the model's own length)")
    parser.add_argument("--bandwidth", type=float, help="memory bandwidth of a worker in GB/s (default: 35)")
    parser.add_argument("--tflops", type=float, help="matrix rate of a worker in TFLOP/s (default: 0.4)")
    for name, default, what in _ENGINE_OPTIONS:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=f"{what} (default: {default:g})")
    parser.add_argument("--enable-expert-parallel", action="store_true", help="whole experts on each worker of a layer")
    plan_slo.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.slo is not None:
        return plan_slo.run(arguments)
    if arguments.trace is not None:
        raise OptionError("trace: is tried against what is promised. Give --slo, as ttft_p90<1s.")
    facts = _facts_of(arguments.model)
    deployment = Deployment.of(arguments)
    context = arguments.context or facts.max_model_len or 2048
    shape = _shape_of(facts)
    weights = Weights.of(facts, shape, arguments.dtype, arguments.quantization)
    kv_dtype = arguments.kv_cache_dtype or arguments.dtype
    budget = budget_of(shape, weights, deployment, arguments.dtype)
    if facts.sees_all:
        print("\n".join(report_of_encoder(shape, weights, deployment, budget)))
    else:
        print("\n".join(report(shape, weights, kv_dtype, deployment, budget, context)))
    return 0 if budget.left > 0 else DOES_NOT_FIT


def bytes_in_all(argv: list[str], cache_bytes: int) -> int:
    """What a worker takes by the plan of such a command line, with a cache of this size."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    facts = _facts_of(arguments.model)
    shape = _shape_of(facts)
    weights = Weights.of(facts, shape, arguments.dtype, arguments.quantization)
    return budget_of(shape, weights, Deployment.of(arguments), arguments.dtype).taken + cache_bytes


def _facts_of(model: str) -> ModelFacts:
    name = model.lower()
    return ModelFacts.read(model_folder(name) if name in shape_names() else Path(locate(model)))


def _shape_of(facts: ModelFacts) -> ModelShape:
    """What has no head of tokens loads none."""
    return ModelShape.of(facts.hf_config if facts.has_head else {**facts.hf_config, "tie_word_embeddings": True})


def budget_of(shape: ModelShape, weights: Weights, deployment: Deployment, dtype: str) -> MemoryBudget:
    """Of each worker."""
    part = deployment.part_of(shape)
    return MemoryBudget(
        total=deployment.memory_of_worker,
        free=deployment.free_of_worker,
        utilization=deployment.utilization,
        runtime=deployment.runtime_bytes,
        # whatever form they are in, they are shared out as their numbers are
        weights=weights.num_bytes * part.num_parameters // shape.num_parameters,
        largest_step=deployment.step.num_bytes(part, dtype),
    )


@dataclass(frozen=True)
class Deployment:
    """What the model runs on, and the engine's options that bear on it."""

    memory_of_worker: int
    runtime_bytes: int
    machine: Machine
    utilization: float
    num_ranks: int
    num_stages: int
    # workers that keep a part of each block
    num_sharing: int
    has_whole_experts: bool
    step: LargestStep
    device: str | None = None
    # what others have not taken, where it is this machine's memory
    free_of_worker: int | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Deployment:
        for name, default, _ in _ENGINE_OPTIONS:
            if getattr(arguments, name) < 1 and isinstance(default, int):
                raise OptionError(f"{name}={getattr(arguments, name)}: must be at least 1.")
        if not 0 < arguments.gpu_memory_utilization <= 1:
            raise OptionError(
                f"gpu_memory_utilization={arguments.gpu_memory_utilization:g}: must be above 0, at most 1."
            )
        sheet = device_sheet(arguments.device) if arguments.device else None
        bandwidth, tflops = arguments.bandwidth, arguments.tflops
        if sheet is not None:
            bandwidth = bandwidth or sheet.bytes_per_second / 1e9
            tflops = tflops or sheet.flops / 1e12
        bandwidth = _CPU_BANDWIDTH if bandwidth is None else bandwidth
        tflops = _CPU_TFLOPS if tflops is None else tflops
        if bandwidth <= 0 or tflops <= 0 or arguments.context < 0:
            raise OptionError("bandwidth and tflops must be above 0, and context at least 0.")
        num_ranks, num_stages = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
        num_sharing = arguments.context_parallel_size
        if EngineOptions.block_size % num_sharing:
            raise OptionError(
                f"context_parallel_size={num_sharing}: must divide the {EngineOptions.block_size} tokens of a block."
            )
        num_workers = num_ranks * num_stages * num_sharing
        free: int | None = None
        if arguments.memory is not None:
            memory = parse_bytes(arguments.memory, "memory") // num_workers
        elif sheet is not None:
            memory = sheet.memory_bytes
        else:
            machine = process_memory()
            memory = machine.total_bytes // num_workers
            free = machine.free_bytes // num_workers
        return cls(
            memory_of_worker=memory,
            free_of_worker=free,
            runtime_bytes=sheet.runtime_bytes if sheet is not None else PROGRAM_BYTES,
            machine=Machine(tflops * 1e12, bandwidth * 1e9),
            utilization=arguments.gpu_memory_utilization,
            num_ranks=num_ranks,
            num_stages=num_stages,
            num_sharing=num_sharing,
            has_whole_experts=arguments.enable_expert_parallel,
            step=LargestStep(arguments.max_num_batched_tokens, arguments.max_num_seqs),
            device=sheet.name if sheet is not None else None,
        )

    @property
    def num_workers(self) -> int:
        return self.num_ranks * self.num_stages * self.num_sharing

    def part_of(self, shape: ModelShape) -> ModelShape:
        """What a worker has of a model, without what it keeps of a sequence."""
        return shape.of_worker(self.num_ranks, self.num_stages, has_whole_experts=self.has_whole_experts)


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
    shape: ModelShape, weights: Weights, kv_dtype: str, deployment: Deployment, budget: MemoryBudget, context: int
) -> list[str]:
    """The plan as lines; every figure is a formula of chapter 2."""
    kept = Kept.of(deployment.part_of(shape), kv_dtype, context, deployment.num_sharing)
    lines = [
        *_lines_of_weights(shape, weights),
        f"KV cache            {shape.kv_bytes_per_token(kv_dtype):,} bytes a token as {kv_dtype}; "
        f"{shape.kv_bytes(context, kv_dtype) / _GIB:.3f} GiB for {context:,} tokens",
        *_lines_of_workers(deployment, kept),
        *kept.state.lines(),
        *_lines_of_budget(deployment, budget),
    ]
    if budget.left <= 0:
        return [*lines, f"does not fit        {_size(-budget.left)} a worker are missing before there is a KV cache"]
    return [
        *lines,
        *_lines_of_room(deployment, budget, kept, context),
        *_lines_of_time(shape, weights, deployment, kept),
    ]


def report_of_encoder(shape: ModelShape, weights: Weights, deployment: Deployment, budget: MemoryBudget) -> list[str]:
    """Of a model that computes a request in one step and keeps nothing of it."""
    return [
        *_lines_of_weights(shape, weights),
        "KV cache            none: the tokens of a request see each other and are computed in one step",
        *_lines_of_budget(deployment, budget),
        f"{'left over' if budget.left > 0 else 'does not fit':<20}{_size(abs(budget.left))}",
    ]


@dataclass(frozen=True)
class Kept:
    """What a worker keeps, in bytes: of a block of tokens, of a whole request, and whatever its length is."""

    per_block: int
    per_request: int
    state: KeptState

    @classmethod
    def of(cls, part: ModelShape, kv_dtype: str, context: int, num_sharing: int) -> Kept:
        """`num_sharing`: workers with an equal part of each block; a state is whole on each of them."""
        slots = EngineOptions.block_size // num_sharing
        return cls(
            part.kv_bytes_per_token(kv_dtype) * slots,
            part.kv_bytes(context, kv_dtype) // num_sharing,
            KeptState.of(part, kv_dtype, slots),
        )

    def num_tokens(self, num_bytes: int) -> int | None:
        """In whole blocks, beside one state; None: their number is no matter."""
        if not self.per_block:
            return None
        return max(0, num_bytes - self.state.num_bytes) // self.per_block * EngineOptions.block_size


def _lines_of_workers(deployment: Deployment, kept: Kept) -> list[str]:
    if deployment.num_workers == 1:
        return []
    shape = f"{deployment.num_ranks} share each layer, {deployment.num_stages} stages"
    if deployment.num_sharing > 1:
        shape += f", {deployment.num_sharing} share what is kept of a token"
    per_token = kept.per_block / EngineOptions.block_size
    return [f"workers             {deployment.num_workers} ({shape}), {per_token:,.0f} bytes a token on each"]


def _lines_of_budget(deployment: Deployment, budget: MemoryBudget) -> list[str]:
    """What the engine leaves out of the memory, and which options say so."""
    a_worker = " a worker" if deployment.num_workers > 1 else ""
    whose = "the program" if deployment.device is None else "the device's runtime"
    runtime = f"{_size(budget.runtime)} for {whose}, "
    step = deployment.step
    return [
        f"memory              {_size(budget.total)}{a_worker} x {budget.utilization:g} (gpu_memory_utilization)"
        + (f", {_size(budget.free)} of it free now" if budget.free is not None else ""),
        f"taken               {runtime}{_size(budget.weights)} for weights, {_size(budget.largest_step)} for the "
        f"largest step ({step.num_tokens:,} tokens, {step.num_rows:,} sampling)",
    ]


def _lines_of_room(deployment: Deployment, budget: MemoryBudget, kept: Kept, context: int) -> list[str]:
    num_requests = budget.left / (kept.per_request + kept.state.num_bytes)
    lines = [
        f"fits                {_tokens(kept.num_tokens(budget.left))}, "
        f"which is {num_requests:.1f} requests of {context:,}; {_size(budget.left * deployment.num_workers)} in all"
    ]
    if deployment.device is None:
        of_request = kept.per_request + kept.state.num_bytes
        on_cpu = min(bytes_on_cpu(budget.left, of_request), of_request * deployment.step.num_rows)
        room = _tokens(kept.num_tokens(on_cpu))
        in_all = _size((budget.taken + on_cpu) * deployment.num_workers)
        return [*lines, f"on a CPU            {room} unless kv_cache_memory_bytes says more; {in_all} in all"]
    most = replace(budget, utilization=_MOST_OF_A_DEVICE)
    if most.utilization <= budget.utilization:
        return lines
    room = _tokens(kept.num_tokens(most.left))
    return [*lines, f"at most             {room} with --gpu-memory-utilization {_MOST_OF_A_DEVICE:g}"]


def _tokens(num_tokens: int | None) -> str:
    return "any number of tokens" if num_tokens is None else f"{num_tokens:,} tokens"


def _lines_of_time(shape: ModelShape, weights: Weights, deployment: Deployment, kept: Kept) -> list[str]:
    machine = deployment.machine
    # one stage computes after the other, those that share a layer at once
    floor = machine.weight_floor_seconds(weights.bytes_of_a_token) / deployment.num_ranks
    # a state is read and written in each step
    num_bytes = deployment.num_stages * (kept.per_request + 2 * kept.state.num_bytes)
    # a step of many tokens reads all experts, and multiplies each token with those that it asks
    bound = machine.compute_bound_batch(weights.num_bytes / shape.num_active_parameters)
    return [
        f"one step            at least {floor * 1e3:.2f} ms to read the weights: {1 / floor:.1f} tokens/s alone",
        f"reading the cache   {machine.kv_read_seconds(num_bytes) * 1e3:.2f} ms a step for a whole request",
        f"arithmetic bound    from {bound:.0f} tokens a step on ({machine.ridge:.0f} operations a byte)",
    ]
