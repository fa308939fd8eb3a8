"""A real engine core on a checking executor: scheduler, manager and messages in milliseconds, without a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from quire.engine_core.engine_core import EngineCore
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.kv_cache_manager.prefix_cache import PrefixHasher
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.policies import make_policy
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.scheduler import Scheduler
from quire.messages import EngineOutputs, EngineReady, EngineRequest, SequenceEnd
from quire.sampling_params import SamplingParams
from quire.testing.checking_executor import CheckingExecutor

FULL = KVGroup(("layer",))


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
        policy: str | SchedulingPolicy = "fifo",
        free_order: Sequence[int] | None = None,
        vocab_size: int = 50,
    ) -> None:
        self.executor = CheckingExecutor(list(groups), num_blocks, block_size, vocab_size)
        self.rows = Rows(max_num_seqs, max_model_len)
        hasher = PrefixHasher(block_size, key=b"a key for tests") if prefix_caching else None
        self.pool = BlockPool(num_blocks, free_order)
        self.manager = KVCacheManager(self.pool, list(groups), block_size, self.rows, hasher)
        self.scheduler = Scheduler(
            self.manager,
            self.rows,
            make_policy(policy) if isinstance(policy, str) else policy,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        ready = EngineReady(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, num_blocks=num_blocks, block_size=block_size
        )
        self.core = EngineCore(self.scheduler, self.executor, ready, check_invariants=True)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, SequenceEnd] = {}
        self.cached: dict[int, int] = {}

    def add(
        self, request_id: int, prompt: list[int], *, seed: int = 0, is_final: bool = True, **sampling: object
    ) -> None:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        self.core.add(
            EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params, seed=seed, is_final=is_final)
        )

    def step(self) -> EngineOutputs:
        outputs = self.core.step()
        for sequence_id, token in zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            assert sequence_id not in self.ends, "a token after the end"
            self.tokens[sequence_id].append(token)
        for start in outputs.starts:
            self.cached[start.sequence_id] = start.num_cached_tokens
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
