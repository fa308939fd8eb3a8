"""Builds an engine core: load the model, measure, decide on the cache, connect the parts."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine_core.engine_core import EngineCore
from quire.engine_core.executor.executor import Executor
from quire.engine_core.executor.in_process import InProcessExecutor
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.capacity import CacheOptions, CachePlan, plan_cache
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.kv_cache_manager.prefix_cache import PrefixHasher
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.policies import make_policy
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.recovery import Recovery, RecoveryCosts
from quire.engine_core.scheduler.scheduler import Scheduler
from quire.messages import EngineReady
from quire.observability.phases import PhaseTimer


def build_engine_core(config: EngineConfig) -> EngineCore:
    """The whole core in this process. A user's mistake raises a UserError."""
    phases = PhaseTimer()
    policy = make_policy(config.scheduling_policy)
    with phases.measure("load model"):
        executor = InProcessExecutor(config.worker)
    with phases.measure("measure memory"):
        measured = executor.measure_capacity()
        plan = plan_cache(measured, _asked(config))
    with phases.measure("allocate KV cache"):
        groups = [list(group.layer_names) for group in plan.groups]
        executor.initialize_cache(groups, plan.num_blocks, plan.num_host_blocks)
        seconds_per_block = executor.control("measure_swap", {}) if plan.num_host_blocks else 0.0
    costs = RecoveryCosts(measured.seconds_per_token, seconds_per_block)
    report = [*phases.report(), plan.explanation]
    return assemble(config, executor, plan, make_scheduler(config, plan, policy=policy, costs=costs), report)


def make_scheduler(
    config: EngineConfig,
    plan: CachePlan,
    policy: SchedulingPolicy | None = None,
    costs: RecoveryCosts = RecoveryCosts(),  # noqa: B008 (frozen)
) -> Scheduler:
    rows = Rows(config.max_num_seqs, plan.max_model_len)
    pool = BlockPool(plan.num_blocks, keeps_contents=config.enable_prefix_caching)
    hasher = PrefixHasher(config.block_size)
    manager = KVCacheManager(pool, plan.groups, config.block_size, rows, hasher, plan.num_host_blocks)
    return Scheduler(
        manager,
        rows,
        policy or make_policy(config.scheduling_policy),
        Recovery(manager, rows, config.preemption_mode, costs),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        vocab_size=config.facts.vocab_size,
    )


def assemble(
    config: EngineConfig, executor: Executor, plan: CachePlan, scheduler: Scheduler, report: list[str]
) -> EngineCore:
    ready = EngineReady(
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        report=report,
    )
    return EngineCore(scheduler, executor, ready, check_invariants=config.check_invariants)


def _asked(config: EngineConfig) -> CacheOptions:
    return CacheOptions(
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        may_lower_max_model_len=config.may_lower_max_model_len,
        max_num_seqs=config.max_num_seqs,
        step_tokens=config.max_num_batched_tokens,
        num_blocks=config.num_blocks_override,
        memory_bytes=config.kv_cache_memory_bytes,
        swap_space_bytes=config.swap_space_bytes,
        is_cpu=config.worker.device == "cpu",
    )
