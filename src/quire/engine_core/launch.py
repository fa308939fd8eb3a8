"""Builds an engine core: load the model, measure, decide on the cache, connect the parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.chain_hashes import ChainHasher
from quire.config import EngineConfig, KVConnectorConfig, WorkerConfig
from quire.engine_core.cache_feed import CacheFeed
from quire.engine_core.engine_core import EngineCore
from quire.engine_core.executor.executor import Executor
from quire.engine_core.executor.in_process import InProcessExecutor
from quire.engine_core.executor.placement import Placement
from quire.engine_core.idle_memory import IdleMemory, NoIdleMemory, idle_memory
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.cache_changes import CacheChangeLog
from quire.engine_core.kv_cache_manager.capacity import CacheOptions, CachePlan, plan_cache
from quire.engine_core.kv_cache_manager.eviction import eviction_order
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.kv_cache_manager.prefix_cache import PrefixHasher
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.adapters import EngineAdapters
from quire.engine_core.scheduler.constraints import (
    AdapterSlots,
    ChunkAlignment,
    Constraint,
    EncoderBudget,
    LongPrefill,
    OneStepAtATime,
)
from quire.engine_core.scheduler.policies import make_policy
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.prerequisites import Prerequisite
from quire.engine_core.scheduler.recovery import Recovery, RecoveryCosts
from quire.engine_core.scheduler.scheduler import Scheduler
from quire.engine_core.scheduler.shared_blocks import transfers_with
from quire.engine_core.scheduler.speculation import AdaptiveSpeculation, Speculation, SpeculationCosts
from quire.engine_core.scheduler.step_budget import StepBudget
from quire.failpoints import failpoint
from quire.kv_connectors import make_scheduler_half
from quire.kv_connectors.connector import CacheLayout, NamedBlocks, SchedulerHalf
from quire.messages import EngineReady, WorkerCapacity
from quire.observability.phases import PhaseTimer
from quire.observability.recorder import DecisionRecorder, Recorder
from quire.observability.step_times import CORE_PHASES, NoStepTimes, StepTimes

if TYPE_CHECKING:
    from quire.engine_core.executor.group import GroupExecutor

# Steps of a tiny model are hundreds of calls of a few microseconds. A second thread that decides the next step takes
# the interpreter's lock from it between two of them, and the step loses more than the decision gains
# (benchmarks/async_scheduling.py). Above this, most of a step runs outside of the interpreter.
_SHORT_STEP = 0.004


def build_engine_core(
    config: EngineConfig,
    executor: Executor | None = None,
    *,
    policy: SchedulingPolicy | None = None,
    make_manager: Callable[..., KVCacheManager] = KVCacheManager,
    make_half: Callable[[KVConnectorConfig | None, CacheLayout], SchedulerHalf | NamedBlocks] = make_scheduler_half,
    recorder: Recorder | None = None,
) -> EngineCore:
    """The whole core in this process, with workers, a policy, a manager, a connector and a recorder of its own or with
    those that are given. A user's mistake raises a UserError."""
    phases = PhaseTimer()
    policy = policy or _policy(config)  # a wrong name is found before anything is loaded
    failpoint("start_load")
    with phases.measure("load model"):
        executor = executor or make_executor(config.worker)
    failpoint("start_measure")
    with phases.measure("measure memory"):
        measured = executor.measure_capacity()
        plan = plan_cache(measured, _asked(config))
    failpoint("start_allocate")
    with phases.measure("allocate KV cache"):
        groups = [list(group.layer_names) for group in plan.groups]
        executor.initialize_cache(groups, plan.num_blocks, plan.num_host_blocks)
        seconds_per_block = executor.control("measure_swap", {}) if plan.num_host_blocks else 0.0
    costs = RecoveryCosts(measured.seconds_per_token, seconds_per_block)
    budget = StepBudget.by_prices(
        config.max_num_batched_tokens,
        config.target_inter_token_latency,
        measured.seconds_per_step,
        measured.seconds_per_token,
        measured.seconds_per_pair,
        measured.layers,
    )
    speculation = _speculation(config, executor, phases)
    connector = make_half(config.kv_connector, _layout(config, groups, measured))
    # numbers are this engine's own
    adapters = EngineAdapters(
        executor.control, config.worker.max_cpu_loras, content_names_blocks=isinstance(connector, NamedBlocks)
    )
    is_ahead, reason = _runs_ahead(config, measured)
    # a step for each stage of a pipeline, and one that is decided while they run
    depth = config.worker.grid.pipeline - 1 + is_ahead
    feed = _feed(config, plan, adapters)
    scheduler = make_scheduler(
        config,
        plan,
        policy=policy,
        costs=costs,
        budget=budget,
        speculation=speculation,
        connector=connector,
        prerequisites=[adapters],
        num_cohorts=1 if config.worker.grid.pipeline == 1 else 1 + depth,
        changes=feed.changes if feed is not None else None,
        make_manager=make_manager,
        recorder=recorder,
    )
    if depth:
        executor.run_ahead()
    failpoint("start_ready")
    memory = _idle_memory_of(config, measured, scheduler, executor)
    core = assemble(
        config,
        executor,
        plan,
        scheduler,
        [*phases.report(), plan.explanation, *memory.report, reason, *budget.report()],
        depth=depth,
        feed=feed,
        memory=memory,
        times=StepTimes(time.perf_counter, CORE_PHASES),
    )
    core.ready.seconds_per_token = measured.seconds_per_token
    core.ready.seconds_per_step = measured.seconds_per_step
    return core


def _idle_memory_of(
    config: EngineConfig, measured: WorkerCapacity, scheduler: Scheduler, executor: Executor
) -> IdleMemory | NoIdleMemory:
    """On a CPU blocks go back to the system when nobody needs them."""
    if config.worker.device != "cpu":
        return NoIdleMemory()
    pool = scheduler.manager.pool
    memory = idle_memory(pool, measured.layers, config.worker.slots_per_block, executor.control)
    memory.foresee(measured.step_bytes + config.recorder_bytes)
    return memory


def _layout(config: EngineConfig, groups: list[list[str]], measured: WorkerCapacity) -> CacheLayout:
    kv_dtype = config.worker.kv_cache_dtype or config.worker.dtype
    return CacheLayout.of(config.worker.model_as_run, kv_dtype, config.block_size, groups, measured.layers)


def make_executor(config: WorkerConfig) -> InProcessExecutor | GroupExecutor:
    if config.grid.size == 1:
        return InProcessExecutor(config)
    # sockets are loaded where there are several workers
    from quire.engine_core.executor.group import GroupExecutor

    return GroupExecutor(config, _placement(config))


def _placement(config: WorkerConfig) -> Placement:
    if config.executor_backend == "mp":
        from quire.engine_core.executor.child_placement import ChildPlacement

        return ChildPlacement(config)
    from quire.engine_core.executor.ray_placement import RayPlacement

    return RayPlacement(config)


def make_scheduler(
    config: EngineConfig,
    plan: CachePlan,
    policy: SchedulingPolicy | None = None,
    costs: RecoveryCosts = RecoveryCosts(),  # noqa: B008 (frozen)
    budget: StepBudget | None = None,
    speculation: Speculation | None = None,
    connector: SchedulerHalf | NamedBlocks | None = None,
    prerequisites: Sequence[Prerequisite] = (),
    num_cohorts: int = 1,
    changes: CacheChangeLog | None = None,
    make_manager: Callable[..., KVCacheManager] = KVCacheManager,
    recorder: Recorder | None = None,
) -> Scheduler:
    """`num_cohorts`: so many steps may be under way, each with other rows; 1: rows may be in all that are."""
    rows = Rows(config.max_num_seqs, plan.max_model_len)
    recorder = recorder or _recorder(config)
    pool = BlockPool(
        plan.num_blocks,
        keeps_contents=config.enable_prefix_caching,
        recorder=recorder,
        order=eviction_order(plan.num_blocks, config.tenant_cache_share),
        changes=changes,
    )
    manager = make_manager(
        pool,
        plan.groups,
        config.block_size,
        rows,
        hasher=PrefixHasher(config.block_size, config.prefix_hash_key or None),
        num_host_blocks=plan.num_host_blocks,
        lookahead=config.speculation.lookahead if config.speculation else 0,
        num_uncertain=_num_uncertain(config),
        checkpoint_interval=config.state_checkpoint_interval,
        checkpoint_share=config.state_checkpoint_share,
        least_checkpoint=_tokens_worth_a_copy(plan, costs),
    )
    recovery = Recovery(manager, rows, config.preemption_mode, costs)
    return Scheduler(
        manager,
        rows,
        policy or _policy(config),
        recovery,
        budget=budget or StepBudget(config.max_num_batched_tokens),
        max_model_len=plan.max_model_len,
        vocab_size=config.facts.vocab_size,
        speculation=speculation,
        transfers=transfers_with(connector, manager, recovery.seconds_per_token),
        constraints=_constraints(config, num_cohorts),
        prerequisites=prerequisites,
        sees_all=config.facts.sees_all,
        most_tokens=config.worker.burst_times.most_tokens,
    )


def _feed(config: EngineConfig, plan: CachePlan, adapters: EngineAdapters) -> CacheFeed | None:
    if config.kv_events is None and not config.tells_cache_changes:
        return None
    digest = ChainHasher(config.block_size, config.prefix_hash_key or None).digest
    log = CacheChangeLog(
        CacheChangeLog.group_of(plan.groups),
        config.block_size,
        digest,
        adapters.name_of,
        # a front that chooses between cores needs names alone
        tells_contents=config.kv_events is not None,
    )
    publisher = None
    if config.kv_events is not None:
        from quire.engine_core.kv_event_publisher import KVEventPublisher

        publisher = KVEventPublisher(config.kv_events, config.replica)
    return CacheFeed(log, publisher, tells_client=config.tells_cache_changes)


def _tokens_worth_a_copy(plan: CachePlan, costs: RecoveryCosts) -> int:
    """Computing so many takes as long as copying the state behind them, once to leave it and once to go on from it."""
    copying = 2 * plan.groups[-1].num_state_blocks * costs.seconds_per_block
    return int(copying / costs.seconds_per_token) if costs.seconds_per_token else 0


def _recorder(config: EngineConfig) -> Recorder:
    # The monotonic clock is the same in all processes of a machine, so that the server can compare times.
    return DecisionRecorder(config.recorder_bytes, time.monotonic) if config.recorder_bytes else Recorder()


def _policy(config: EngineConfig) -> SchedulingPolicy:
    return make_policy(config.scheduling_policy, staging_size=config.staging_size, progress_share=config.progress_share)


def _constraints(config: EngineConfig, num_cohorts: int) -> list[Constraint]:
    constraints: list[Constraint] = []
    if num_cohorts > 1:
        constraints.append(OneStepAtATime(num_cohorts))
    if config.long_prefill_token_threshold:
        constraints.append(LongPrefill(config.long_prefill_token_threshold))
    if config.chunk_alignment > 1:
        constraints.append(ChunkAlignment(config.chunk_alignment))
    if config.worker.max_loras:
        constraints.append(AdapterSlots(config.worker.max_loras))
    if config.facts.sees_images or config.facts.has_sources:
        constraints.append(EncoderBudget(config.images.max_num_encoder_tokens))
    return constraints


def _speculation(config: EngineConfig, executor: Executor, phases: PhaseTimer) -> Speculation | None:
    """By the prices of steps and drafts on this machine."""
    asked = config.speculation
    if asked is None:
        return None
    with phases.measure("measure speculation"):
        costs = SpeculationCosts(**executor.control("measure_speculation", {}))
    return AdaptiveSpeculation(config.max_num_seqs, asked.num_speculative_tokens, asked.lookahead, costs)


def _runs_ahead(config: EngineConfig, measured: WorkerCapacity) -> tuple[bool, str]:
    """4.6.1: whether a step is decided while the one before it runs, and why."""
    took = f"a step of one token takes {measured.seconds_per_step * 1e3:.1f} ms"
    if config.async_scheduling is not None:
        return config.async_scheduling, f"async_scheduling={config.async_scheduling}: as asked; {took}"
    is_ahead = measured.seconds_per_step >= _SHORT_STEP
    why = "long enough to hide the scheduler" if is_ahead else "too short for two threads of one interpreter"
    return is_ahead, f"async_scheduling={is_ahead}: {took}, {why}"


def _num_uncertain(config: EngineConfig) -> int:
    """Tokens of a sequence that may be granted and not be there: drafts, and what is granted on top of them."""
    num_drafts = config.speculation.num_speculative_tokens if config.speculation else 0
    most_in_flight = 0 if config.async_scheduling is False and config.worker.grid.pipeline == 1 else 1
    return num_drafts + most_in_flight * (1 + num_drafts)


def assemble(
    config: EngineConfig,
    executor: Executor,
    plan: CachePlan,
    scheduler: Scheduler,
    report: list[str],
    *,
    depth: int = 0,
    feed: CacheFeed | None = None,
    memory: IdleMemory | NoIdleMemory | None = None,
    times: NoStepTimes | None = None,
) -> EngineCore:
    ready = EngineReady(
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        report=report,
    )
    return EngineCore(
        scheduler,
        executor,
        ready,
        depth=depth,
        check_invariants=config.check_invariants,
        feed=feed,
        memory=memory,
        times=times,
    )


def _asked(config: EngineConfig) -> CacheOptions:
    lookahead = config.speculation.lookahead if config.speculation else 0
    return CacheOptions(
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        may_lower_max_model_len=config.may_lower_max_model_len,
        max_num_seqs=config.max_num_seqs,
        step_tokens=config.max_num_batched_tokens + _num_uncertain(config) + lookahead,
        num_blocks=config.num_blocks_override,
        memory_bytes=config.kv_cache_memory_bytes,
        swap_space_bytes=config.swap_space_bytes,
        num_replicas=config.data_parallel_size,
        num_context_ranks=config.worker.grid.context,
        is_cpu=config.worker.device == "cpu",
    )
