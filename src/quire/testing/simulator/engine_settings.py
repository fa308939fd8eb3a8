"""Ways to run an engine that must change no token: policy, asynchronous scheduling, speculation, limits on chunks.

A random workload draws one (workload.py), and tests name theirs. Sizes of memory are not among them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from quire.engine_core.scheduler.constraints import ChunkAlignment, Constraint, LongPrefill
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.speculation import AdaptiveSpeculation, Speculation, SpeculationCosts
from quire.kv_connectors.memory.store import PrefixStore
from quire.kv_connectors.tiered.settings import TierSettings
from quire.kv_connectors.tiered.tiers import Tiers
from quire.observability.recorder import DecisionRecorder
from quire.testing.core import CoreUnderTest, ManyDrafts
from quire.testing.simulator.executor import SimulatedDrafts

POLICIES = ("fifo", "priority", "srtf", "two_level")


@dataclass(frozen=True)
class EngineSettings:
    """`drafting` says who decides how many drafts there are: nobody (none), steady, changing or adaptive."""

    policy: str = "fifo"
    policy_options: dict[str, Any] = field(default_factory=dict)
    is_async: bool = False
    drafting: str = "none"
    most_drafts: int = 0
    drafts: SimulatedDrafts | None = None
    long_prefill_threshold: int = 0
    chunk_unit: int = 0
    # prompts are stored for others and fetched, where no window and no state is
    has_connector: bool = False
    # what a workload asks for beside
    priorities: tuple[int, ...] = (0, 0, 1)
    max_num_seqs: int | None = None
    # what is decided is recorded, in so little memory that much is dropped
    is_recorded: bool = False
    # several tenants, and what part of the cache each may fill before its own blocks go first
    tenant_cache_share: float | None = None
    # blocks go on living elsewhere in so many bytes, where no window and no state is; 0: they do not
    tier_bytes: int = 0
    # between tokens of an answer; 0: no target
    target_seconds: float = 0.0

    def core(self, *, policy: str | SchedulingPolicy | None = None, max_num_seqs: int, **sizes: Any) -> CoreUnderTest:
        """A core that runs so; a policy that is given takes the place of its own."""
        groups = sizes.get("groups", ())
        may_have_store = not any(group.sliding_window or group.num_state_blocks for group in groups)
        num_rows = self.max_num_seqs or max_num_seqs
        return CoreUnderTest(
            **sizes,
            max_num_seqs=num_rows,
            policy=policy or self.policy,
            policy_options=self.policy_options,
            is_async=self.is_async,
            num_drafts=self.most_drafts,
            drafts=self.drafts,
            speculation=self._speculation(num_rows),
            constraints=self._constraints(),
            store=PrefixStore() if self.has_connector and may_have_store else None,
            tiers=self._tiers() if may_have_store else None,
            recorder=DecisionRecorder(1 << 16, lambda: 0.0) if self.is_recorded else None,
            tenant_cache_share=self.tenant_cache_share,
            target_seconds=self.target_seconds,
        )

    def _tiers(self) -> Tiers | None:
        """Memory alone: threads would make a run another one each time."""
        if not self.tier_bytes or self.has_connector:
            return None
        return Tiers(TierSettings((), self.tier_bytes, 0.0, "always"), [])

    def _speculation(self, num_rows: int) -> Speculation | None:
        if self.drafts is None or not self.most_drafts:
            return None
        lookahead = self.most_drafts if self.drafts.has_cache else 0
        if self.drafting == "adaptive":
            # the more rows there are, the less drafts pay
            costs = SpeculationCosts(
                seconds_per_step=1.0,
                seconds_per_token=0.15,
                seconds_per_draft_step=0.02,
                seconds_per_draft_token=0.02,
            )
            return AdaptiveSpeculation(num_rows, self.most_drafts, lookahead, costs)
        return ManyDrafts(self.most_drafts, lookahead=lookahead, is_steady=self.drafting == "steady")

    def _constraints(self) -> list[Constraint]:
        constraints: list[Constraint] = []
        if self.long_prefill_threshold:
            constraints.append(LongPrefill(self.long_prefill_threshold))
        if self.chunk_unit:
            constraints.append(ChunkAlignment(self.chunk_unit))
        return constraints


# As it was before there was anything to choose.
PLAIN_ENGINE = EngineSettings()


def random_engine(seed: int) -> EngineSettings:
    """Everything with everything; one in eight is the plain one."""
    pick = random.Random(f"engine of {seed}")
    if pick.random() < 0.125:
        return PLAIN_ENGINE
    policy = pick.choice(POLICIES)
    options = {"staging_size": pick.choice([1, 2, 8]), "progress_share": pick.choice([0.0, 0.1, 0.5])}
    drafting = pick.choice(["none", "none", "steady", "changing", "adaptive"])
    return EngineSettings(
        policy=policy,
        policy_options=options if policy == "two_level" else {},
        is_async=pick.random() < 0.6,
        drafting=drafting,
        most_drafts=0 if drafting == "none" else pick.randrange(1, 6),
        drafts=None if drafting == "none" else _random_drafts(pick),
        long_prefill_threshold=pick.choice([0, 0, 0, 2, 5]),
        chunk_unit=pick.choice([0, 0, 0, 2, 4]),
        has_connector=pick.random() < 0.3,
        priorities=pick.choice([(0, 0, 1), (0, 1, 2, 3), (-5, 0, 0, 7)]),
        max_num_seqs=pick.choice([None, None, 2, 3]),
        is_recorded=pick.random() < 0.5,
        # drawn last, so that what was found before is found again
        tenant_cache_share=pick.choice([None, None, None, 0.0, 0.3]),
        tier_bytes=pick.choice([0, 500, 1 << 20]),
        # a step of one token and a few more
        target_seconds=pick.choice([0.0] * 9 + [1e-9, 1.02e-3, 1.1e-3]),
    )


def _random_drafts(pick: random.Random) -> SimulatedDrafts:
    return SimulatedDrafts(
        acceptance=pick.choice([0.0, 0.4, 0.8, 0.8, 1.0]),
        shortfall=pick.choice([0.0, 0.15, 0.5]),
        has_cache=pick.random() < 0.4,
    )
