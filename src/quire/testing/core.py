"""A real engine core on the simulated executor: scheduler, manager and messages in milliseconds, without a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.engine_core.engine_core import EngineCore
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.eviction import eviction_order
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.kv_cache_manager.prefix_cache import PrefixHasher
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.adapters import EngineAdapters
from quire.engine_core.scheduler.constraints import Constraint
from quire.engine_core.scheduler.policies import make_policy
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.prerequisites import Prerequisite
from quire.engine_core.scheduler.recovery import Recovery, RecoveryCosts
from quire.engine_core.scheduler.scheduler import Scheduler
from quire.engine_core.scheduler.shared_blocks import transfers_with
from quire.engine_core.scheduler.speculation import Speculation
from quire.engine_core.scheduler.step_budget import StepBudget
from quire.kv_connectors.connector import CacheLayout, NamedBlocks, SchedulerHalf, WorkerHalf
from quire.kv_connectors.memory.scheduler import MemoryScheduler
from quire.kv_connectors.memory.store import PrefixStore
from quire.kv_connectors.tiered.scheduler import TieredScheduler
from quire.kv_connectors.tiered.tiers import Tiers
from quire.messages import NUM_DRAFTS, DecodingSpec, EngineOutputs, EngineReady, EngineRequest, IntArray, SequenceEnd
from quire.observability.recorder import Recorder
from quire.sampling_params import SamplingParams
from quire.simulation.costs.linear import LinearCosts
from quire.testing.simulator.connector import SimulatedConnector, SimulatedTieredConnector, simulated_layout
from quire.testing.simulator.executor import SimulatedDrafts, SimulatedExecutor

FULL = KVGroup(("layer",))


def loaded_adapters(number: int) -> EngineAdapters:
    """Numbers 1 ... number, of workers that read at once."""
    adapters = EngineAdapters(lambda name, args: {"state": "ready", "error": None, "content": ""}, number)
    for one in range(1, number + 1):
        adapters.load(f"adapter {one}", "/")
        adapters.state(one)
    return adapters


class ManyDrafts:
    """Speculation that never gives up: as many drafts for everybody as are allowed, or a number that changes."""

    def __init__(self, most: int, *, lookahead: int = 0, is_steady: bool = True) -> None:
        self.most = most
        self.lookahead = lookahead
        self.num_verified = 0
        self.num_accepted = 0
        self._is_steady = is_steady
        self._counts: dict[int, tuple[int, int]] = {}

    def num_drafts(self, rows: IntArray, totals: IntArray) -> IntArray | int:
        return self.most if self._is_steady else (totals * 5 + rows) % (self.most + 1)

    def step_data(self, growth: IntArray) -> dict[str, Any]:
        num_drafts = np.maximum(growth - 1, 0)
        return {NUM_DRAFTS: num_drafts} if num_drafts.any() else {}

    def observe(self, speculated: IntArray) -> None:
        for row, _, _, num_verified, num_accepted in speculated.T.tolist():
            verified, accepted = self.counts(row)
            self._counts[row] = (verified + num_verified, accepted + num_accepted)
            self.num_verified += num_verified
            self.num_accepted += num_accepted

    def reset(self, row: int) -> None:
        self._counts.pop(row, None)

    def counts(self, row: int) -> tuple[int, int]:
        return self._counts.get(row, (0, 0))

    def statistics(self) -> dict[str, float]:
        return {}


class CoreUnderTest:
    """Drives a core step by step and collects what each sequence got."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        budget: int = 64,
        max_num_seqs: int = 16,
        max_model_len: int = 128,
        groups: Sequence[KVGroup] = (FULL,),
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        preemption_mode: str = "auto",
        costs: LinearCosts | None = None,
        policy: str | SchedulingPolicy = "fifo",
        policy_options: dict[str, Any] | None = None,
        is_async: bool = False,
        drafts: SimulatedDrafts | None = None,
        num_drafts: int = 0,
        speculation: Speculation | None = None,
        constraints: Sequence[Constraint] = (),
        adapters: EngineAdapters | None = None,
        prerequisites: Sequence[Prerequisite] = (),
        store: PrefixStore | None = None,
        tiers: Tiers | None = None,
        free_order: Sequence[int] | None = None,
        vocab_size: int = 50,
        check_invariants: bool = True,
        recorder: Recorder | None = None,
        tenant_cache_share: float | None = None,
        target_seconds: float = 0.0,
        stretch: float = 1.0,
        checkpoint_interval: int = 8,
        checkpoint_share: float = 0.5,
        make_manager: Callable[..., KVCacheManager] = KVCacheManager,
    ) -> None:
        """At most `num_drafts` for a sequence and step, and always as many unless `speculation` has another opinion;
        `drafts` says how good they are. Cores with the same `store` have the memory connector and share it; with the
        same `tiers` the tiered one."""
        costs = costs or LinearCosts()
        drafts = (drafts or SimulatedDrafts()) if num_drafts else None
        if speculation is None:
            lookahead = num_drafts if drafts is not None and drafts.has_cache else 0
            speculation = ManyDrafts(num_drafts, lookahead=lookahead) if num_drafts else None
        self.speculation = speculation
        self.is_async = is_async
        self.store = store
        self.max_model_len = max_model_len
        self.executor = SimulatedExecutor(
            groups,
            num_blocks,
            block_size,
            vocab_size,
            num_host_blocks=num_host_blocks,
            costs=costs,
            drafts=drafts,
            connector=_worker_half(store, tiers),
        )
        self.clock = self.executor.clock
        self.rows = Rows(max_num_seqs, max_model_len)
        self.recorder = recorder or Recorder()
        order = eviction_order(num_blocks, tenant_cache_share)
        self.pool = BlockPool(
            num_blocks, free_order, keeps_contents=prefix_caching, recorder=self.recorder, order=order
        )
        hasher = PrefixHasher(block_size, key=b"a key for tests")
        self.manager = make_manager(
            self.pool,
            list(groups),
            block_size,
            self.rows,
            hasher,
            num_host_blocks,
            lookahead=speculation.lookahead if speculation is not None else 0,
            num_uncertain=num_drafts + is_async * (1 + num_drafts),
            checkpoint_interval=checkpoint_interval,
            checkpoint_share=checkpoint_share,
        )
        prices = RecoveryCosts(costs.per_token, costs.per_swapped_block)
        growth = costs.per_pair / costs.per_token if costs.per_pair else 0.0
        recovery = Recovery(self.manager, self.rows, preemption_mode, prices)
        half = _scheduler_half(simulated_layout(block_size), store, tiers)
        self.scheduler = Scheduler(
            self.manager,
            self.rows,
            make_policy(policy, **(policy_options or {})) if isinstance(policy, str) else policy,
            recovery,
            budget=StepBudget(budget, target_seconds, costs.per_step, costs.per_token, stretch, least=2, growth=growth),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            speculation=speculation,
            transfers=transfers_with(half, self.manager, recovery.seconds_per_token),
            constraints=constraints,
            prerequisites=[adapters or loaded_adapters(0), *prerequisites],
        )
        ready = EngineReady(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, num_blocks=num_blocks, block_size=block_size
        )
        self.core = EngineCore(
            self.scheduler, self.executor, ready, depth=int(is_async), check_invariants=check_invariants
        )
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, SequenceEnd] = {}
        self.cached: dict[int, int] = {}
        self.vectors: dict[int, bytes] = {}

    def add(
        self,
        request_id: int,
        prompt: list[int],
        *,
        seed: int = 0,
        is_final: bool = True,
        request: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> None:
        """`sampling` are SamplingParams (greedy unless they say so), `request` further fields of EngineRequest."""
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        self.core.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=params,
                seed=seed,
                is_final=is_final,
                **(request or {}),
            )
        )

    def beam(
        self,
        request_id: int,
        prompt: list[int],
        width: int,
        *,
        request: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> None:
        """Beam search; all beams are asked for unless `n` says otherwise."""
        decoding = DecodingSpec(method="beam_search", args={"width": width})
        self.add(request_id, prompt, request={"decoding": decoding, **(request or {})}, **{"n": width, **sampling})

    def step(self) -> EngineOutputs:
        outputs = self.core.step()
        for sequence_id, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            assert sequence_id not in self.ends, "a token after the end"
            self.tokens[sequence_id].append(token)
        for start in outputs.starts:
            self.cached[start.sequence_id] = start.num_cached_tokens
        for found in outputs.vectors:
            assert found.sequence_id not in self.ends, "a vector after the end"
            self.vectors[found.sequence_id] = found.values
        for end in outputs.ends:
            assert end.sequence_id not in self.ends, "a sequence ended twice"
            self.ends[end.sequence_id] = end
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        """Until there is nothing to do."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def poison_free_blocks(self) -> None:
        """After a step: whoever reads what is free from now on is wrong."""
        self.executor.poison(self.pool.free_blocks, self.manager.swap.free_blocks)

    def assert_empty(self) -> None:
        """Nothing is held by anybody, on the device, in swap space or in the rows; the counters agree."""
        assert self.pool.num_held == 0, f"{self.pool.num_held} blocks are still held"
        assert self.rows.num_free == self.rows.num_rows, "rows are still taken"
        assert not self.scheduler.lifecycle.requests, "requests are still known"
        memory = self.core.control("memory", {})
        assert memory["slots"]["cached"] + memory["slots"]["free"] == self.pool.num_blocks * self.manager.block_size
        assert memory["host_slots"]["swapped"] == 0, "blocks are still in swap space"
        statistics, work = self.core.statistics(), self.executor.work
        assert statistics["num_requests_running"] == statistics["num_requests_waiting"] == 0
        assert statistics["swapped_out_blocks_total"] == work.num_swapped_out_blocks
        assert statistics["swapped_in_blocks_total"] == work.num_swapped_in_blocks
        assert statistics["num_blocks_copied_total"] >= work.num_copied_blocks


def _scheduler_half(
    layout: CacheLayout, store: PrefixStore | None, tiers: Tiers | None
) -> SchedulerHalf | NamedBlocks | None:
    if tiers is not None:
        return TieredScheduler(layout, tiers)
    return MemoryScheduler(layout, store) if store is not None else None


def _worker_half(store: PrefixStore | None, tiers: Tiers | None) -> WorkerHalf | None:
    if tiers is not None:
        return SimulatedTieredConnector(tiers)
    return SimulatedConnector(store) if store is not None else None
