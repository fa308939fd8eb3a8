"""What one engine runs on: a model, devices that share it, and the engine's options. Makes the core for a replica.

The options are those of the engine itself, resolved as the engine resolves them; memory is what a worker would find
after loading (config/memory_budget.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config import EngineConfig, EngineOptions, KVConnectorConfig, RankGrid, resolve
from quire.config.arithmetic import FLOAT_BYTES, ModelShape
from quire.config.device_sheets import DeviceSheet
from quire.config.memory_budget import LargestStep, MemoryBudget
from quire.config.weight_sizes import expert_bytes, looked_up_bytes, weight_bytes
from quire.engine_core.engine_core import EngineCore
from quire.engine_core.executor.modelled import (
    CostModel,
    DraftQuality,
    ModelledExecutor,
    StepWork,
    VirtualClock,
    check_laid_over,
)
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.launch import build_engine_core
from quire.errors import CapacityError, OptionError
from quire.kv_connectors import make_scheduler_half
from quire.kv_connectors.connector import CacheLayout, NamedBlocks, SchedulerHalf
from quire.messages import LayerSpec, WorkerCapacity
from quire.simulation.costs.roofline import Efficiency, ModelPart, RooflineCosts
from quire.simulation.layers import layer_specs
from quire.simulation.measured import MeasuredSteps
from quire.simulation.names import TraceHasher
from quire.simulation.shapes import model_folder

_GIB = 2**30
# memory of the host that each device may use for swapped blocks
_HOST_BYTES = 32 * _GIB
# a step in which drafts are verified
_MANY_TOKENS = 32
# of context, where attention is priced
_FAR = 8192

# a cost model of an engine on a device, whose workers compute this
Price = Callable[[EngineConfig, DeviceSheet, ModelPart], CostModel]


@dataclass(frozen=True)
class Deployment:
    """One engine: everything that its replicas have in common."""

    config: EngineConfig
    device: DeviceSheet
    capacity: WorkerCapacity
    costs: CostModel
    budget: MemoryBudget
    drafts: DraftQuality
    swap_seconds_per_block: float
    # over the link to another device; 0: nobody knows
    move_seconds_per_block: float = 0.0
    # what brings KV from elsewhere
    make_half: Callable[[KVConnectorConfig | None, CacheLayout], SchedulerHalf | NamedBlocks] = make_scheduler_half

    @property
    def num_devices(self) -> int:
        return self.config.worker.grid.size

    def of_replica(self, number: int, prefix_hash_key: bytes) -> Deployment:
        """The same for one of several, which tells what its cache gains and loses."""
        return replace(self, config=self.config.of_replica(number, prefix_hash_key))

    def core(self, clock: VirtualClock) -> EngineCore:
        """A replica with an empty cache."""
        hasher = TraceHasher(self.config.block_size, self.config.prefix_hash_key or None)

        def make_manager(*parts: Any, **named: Any) -> KVCacheManager:
            return KVCacheManager(*parts, **{**named, "hasher": hasher})

        return build_engine_core(self.config, self.executor(clock), make_half=self.make_half, make_manager=make_manager)

    def executor(self, clock: VirtualClock) -> ModelledExecutor:
        return ModelledExecutor(
            self.capacity,
            self.costs,
            clock=clock,
            num_stages=self.config.worker.grid.pipeline,
            vocab_size=self.config.facts.vocab_size,
            drafts=self.drafts,
            control={"measure_swap": self.swap_seconds_per_block, "measure_speculation": self._speculation_costs()},
        )

    def _speculation_costs(self) -> dict[str, float]:
        """Of steps of few tokens, and of drafts that are looked up, which cost nothing."""
        per_token = (_seconds(self.costs, _MANY_TOKENS) - _seconds(self.costs, 1)) / (_MANY_TOKENS - 1)
        return {"seconds_per_step": _seconds(self.costs, 1) - per_token, "seconds_per_token": per_token}


def deploy(
    model: str,
    device: DeviceSheet,
    options: Mapping[str, Any] | None = None,
    *,
    costs: CostModel | Price | None = None,
    efficiency: Efficiency | None = None,
    drafts: DraftQuality | None = None,
) -> Deployment:
    """`model`: a name (simulation/shapes) or a folder. `options`: of the engine, by name. `costs`: instead of the
    roofline of the device. Raises a UserError that says in one line what does not fit."""
    given = dict(options or {})
    ranks = given.pop("tensor_parallel_size", 1)
    stages = given.pop("pipeline_parallel_size", 1)
    # nobody looks at what is recorded, and there are no processors to share
    asked = {"recorder_bytes": 0, "async_scheduling": False, "num_threads": 1, **given}
    kind = "cpu" if device.name.startswith("cpu") else "cuda"
    config = _resolved(model, kind, asked)
    if config.speculation is not None and config.speculation.model_path is not None:
        raise OptionError("speculative_config: models that draft cannot be priced yet. Use ngram, or leave it out.")
    worker = replace(config.worker, grid=RankGrid(tensor=ranks, pipeline=stages), processors=None)
    config = replace(config, worker=worker, engine_process=False)
    part, budget = _memory(config, device)
    priced = RooflineCosts(device, part, efficiency or Efficiency())
    chosen = costs(config, device, part) if callable(costs) else costs or priced
    shape = ModelShape.of(config.facts.hf_config).of_worker(ranks, 1)
    layers = layer_specs(shape, worker.kv_cache_dtype or worker.dtype, config.facts.hf_config)
    num_tokens = config.max_num_batched_tokens
    capacity = WorkerCapacity(
        layers=layers,
        available_bytes=budget.left,
        explanation=f"{device.name}: {budget.left / _GIB:.1f} GiB is left for the KV cache.",
        host_bytes=_HOST_BYTES,
        seconds_per_token=_seconds(chosen, num_tokens) / num_tokens,
        seconds_per_step=_seconds(chosen, 1),
        seconds_per_pair=_seconds_per_pair(chosen, num_tokens, layers),
        num_layers_of_stages=_layers_of_stages(len(layers), stages),
    )
    return Deployment(
        config=config,
        device=device,
        capacity=capacity,
        costs=chosen,
        budget=budget,
        drafts=drafts or DraftQuality(),
        swap_seconds_per_block=priced.swap_seconds(),
        move_seconds_per_block=priced.move_seconds(device.link_bytes_per_second),
    )


def _resolved(model: str, device: str, asked: Mapping[str, Any]) -> EngineConfig:
    config, _ = resolve(EngineOptions(model=str(model_folder(model)), device=device, load_format="dummy", **asked))
    check_laid_over(config.worker)
    return config


def deploy_measured(model: str, measured: MeasuredSteps, options: Mapping[str, Any] | None = None) -> Deployment:
    """On the machine where these steps were measured, with this model."""
    asked = {"recorder_bytes": 0, "async_scheduling": False, "num_threads": 1, **(options or {})}
    config = _resolved(model, "cpu", asked)
    for name, size in (("tensor", config.worker.grid.tensor), ("pipeline", config.worker.grid.pipeline)):
        if size > 1:
            raise OptionError(f"{name}_parallel_size={size}: steps were measured with one worker. Leave it out.")
    memory = measured.capacity.available_bytes
    sheet = DeviceSheet("cpu", memory, bytes_per_second=1.0, flops=1.0, link_bytes_per_second=1.0, runtime_bytes=0)
    return Deployment(
        config=replace(config, engine_process=False),
        device=sheet,
        capacity=measured.capacity,
        costs=measured.costs(),
        budget=MemoryBudget(memory, 1.0, 0, 0, 0),
        drafts=DraftQuality(),
        swap_seconds_per_block=measured.swap_seconds_per_block,
    )


def _memory(config: EngineConfig, device: DeviceSheet) -> tuple[ModelPart, MemoryBudget]:
    """What a worker computes, and what its memory is taken by."""
    worker, facts = config.worker, config.facts
    grid, dtype = worker.grid, worker.dtype
    whole = ModelShape.of(facts.hf_config)
    fullest = whole.of_worker(grid.tensor, grid.pipeline)
    total, _ = weight_bytes(facts, whole, dtype, worker.quantization)
    weights = total * fullest.num_parameters // whole.num_parameters
    step = LargestStep(config.max_num_batched_tokens, config.max_num_seqs)
    budget = MemoryBudget(
        total=device.memory_bytes,
        utilization=worker.gpu_memory_utilization,
        runtime=device.runtime_bytes,
        weights=weights,
        largest_step=step.num_bytes(fullest, dtype),
    )
    if budget.left <= 0:
        raise CapacityError(
            f"{config.served_model_name.rpartition('/')[2]} on {grid.size} x {device.name}: weights take "
            f"{weights / _GIB:.1f} GiB a device and the largest step {budget.largest_step / _GIB:.1f} GiB of "
            f"{device.memory_bytes / _GIB:.1f} GiB. Raise tensor_parallel_size, or choose a larger device."
        )
    # a rank's part of all stages, one of which computes after the other
    share = 1 / grid.tensor
    experts = expert_bytes(facts, whole, dtype, worker.quantization)
    head = whole.vocab_size * whole.hidden_size * FLOAT_BYTES[dtype]
    looked_up = looked_up_bytes(facts, whole, dtype)
    kv_dtype = worker.kv_cache_dtype or dtype
    part = ModelPart(
        shape=whole.of_worker(grid.tensor, 1),
        dtype=dtype,
        dense_bytes=max(0.0, total - experts - head - looked_up) * share,
        expert_bytes=experts * share,
        head_bytes=head * share,
        block_bytes=fullest.kv_bytes_per_token(kv_dtype) * config.block_size,
        num_ranks=grid.tensor,
        num_stages=grid.pipeline,
    )
    return part, budget


def _seconds(costs: CostModel, num_tokens: int) -> float:
    """Of a step that computes so many tokens of a prompt, without context."""
    return float(costs.seconds(StepWork(num_rows=1, num_tokens=num_tokens, num_sampled=1)))


def _seconds_per_pair(costs: CostModel, num_tokens: int, layers: Sequence[LayerSpec]) -> float:
    """What each of so many tokens takes longer for a token before it, if all layers see that."""
    attention = [layer for layer in layers if not layer.state_bytes]
    work = StepWork(
        num_rows=1,
        num_tokens=num_tokens,
        num_sampled=1,
        context_tokens=_FAR,
        context_bytes=float(_FAR * sum(layer.bytes_per_token for layer in attention)),
        attention_pairs=float(num_tokens * _FAR * len(attention)),
    )
    return (float(costs.seconds(work)) - _seconds(costs, num_tokens)) / (num_tokens * _FAR)


def _layers_of_stages(num_layers: int, num_stages: int) -> list[int]:
    if num_stages == 1:
        return []
    share, more = divmod(num_layers, num_stages)
    return [share + (stage < more) for stage in range(num_stages)]
