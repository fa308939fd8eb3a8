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
from quire.engine_core.scheduler.constraints import ChunkAlignment, Constraint, LongPrefill
from quire.engine_core.scheduler.policies import make_policy
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.recovery import Recovery, RecoveryCosts
from quire.engine_core.scheduler.scheduler import Scheduler
from quire.engine_core.scheduler.speculation import AdaptiveSpeculation, Speculation, SpeculationCosts
from quire.messages import EngineReady
from quire.observability.phases import PhaseTimer


def build_engine_core(config: EngineConfig) -> EngineCore:
    """The whole core in this process. A user's mistake raises a UserError."""
    phases = PhaseTimer()
    policy = _policy(config)  # a wrong name is found before anything is loaded
    with phases.measure("load model"):
        executor = InProcessExecutor(config.worker, is_async=config.async_scheduling)
    with phases.measure("measure memory"):
        measured = executor.measure_capacity()
        plan = plan_cache(measured, _asked(config))
    with phases.measure("allocate KV cache"):
        groups = [list(group.layer_names) for group in plan.groups]
        executor.initialize_cache(groups, plan.num_blocks, plan.num_host_blocks)
        seconds_per_block = executor.control("measure_swap", {}) if plan.num_host_blocks else 0.0
    costs = RecoveryCosts(measured.seconds_per_token, seconds_per_block)
    speculation = None
    if config.speculation is not None:
        with phases.measure("measure speculation"):
            speculation = _speculation(config, SpeculationCosts(**executor.control("measure_speculation", {})))
    scheduler = make_scheduler(config, plan, policy=policy, costs=costs, speculation=speculation)
    return assemble(config, executor, plan, scheduler, [*phases.report(), plan.explanation])


def make_scheduler(
    config: EngineConfig,
    plan: CachePlan,
    policy: SchedulingPolicy | None = None,
    costs: RecoveryCosts = RecoveryCosts(),  # noqa: B008 (frozen)
    speculation: Speculation | None = None,
) -> Scheduler:
    rows = Rows(config.max_num_seqs, plan.max_model_len)
    pool = BlockPool(plan.num_blocks, keeps_contents=config.enable_prefix_caching)
    hasher = PrefixHasher(config.block_size)
    manager = KVCacheManager(
        pool,
        plan.groups,
        config.block_size,
        rows,
        hasher,
        plan.num_host_blocks,
        lookahead=config.speculation.lookahead if config.speculation else 0,
        num_uncertain=_num_uncertain(config),
    )
    return Scheduler(
        manager,
        rows,
        policy or _policy(config),
        Recovery(manager, rows, config.preemption_mode, costs),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        vocab_size=config.facts.vocab_size,
        speculation=speculation,
        constraints=_constraints(config),
    )


def _policy(config: EngineConfig) -> SchedulingPolicy:
    return make_policy(config.scheduling_policy, staging_size=config.staging_size, progress_share=config.progress_share)


def _constraints(config: EngineConfig) -> list[Constraint]:
    constraints: list[Constraint] = []
    if config.long_prefill_token_threshold:
        constraints.append(LongPrefill(config.long_prefill_token_threshold))
    if config.chunk_alignment > 1:
        constraints.append(ChunkAlignment(config.chunk_alignment))
    return constraints


def _speculation(config: EngineConfig, costs: SpeculationCosts) -> Speculation:
    asked = config.speculation
    assert asked is not None
    return AdaptiveSpeculation(config.max_num_seqs, asked.num_speculative_tokens, asked.lookahead, costs)


def _depth(config: EngineConfig) -> int:
    """4.6.1: steps in flight while the next one is decided."""
    return 1 if config.async_scheduling else 0


def _num_uncertain(config: EngineConfig) -> int:
    """Tokens of a sequence that may be granted and not be there: drafts, and what is granted on top of them."""
    num_drafts = config.speculation.num_speculative_tokens if config.speculation else 0
    return num_drafts + _depth(config) * (1 + num_drafts)


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
    return EngineCore(scheduler, executor, ready, depth=_depth(config), check_invariants=config.check_invariants)


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
        is_cpu=config.worker.device == "cpu",
    )
