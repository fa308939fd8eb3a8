"""Hypothesis drives a small core, so that a broken rule comes as a short list of calls.

Each call of the core is held against what it must answer (quire.testing.simulator.checked_core): I1 to I20 of
docs/simulator.md, as far as they apply to one core without a network.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import DecodingSpec, EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulation.costs.linear import LinearCosts
from quire.testing.core import FULL
from quire.testing.simulator.checked_core import CheckedCore
from quire.testing.simulator.engine_settings import POLICIES, EngineSettings
from quire.testing.simulator.executor import SimulatedDrafts

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=7)
HANDLES = st.sampled_from(["a", "b"])
GROUPS = {"full": [FULL], "window": [KVGroup(("a",), 3)], "mixed": [KVGroup(("a",)), KVGroup(("b",), 3)]}
GROUPS |= {
    "chunks": [KVGroup(("a",), 3, is_chunked=True)],
    "mixed chunks": [KVGroup(("a",)), KVGroup(("b",), 4, is_chunked=True)],
}
MAX_MODEL_LEN = 12


class CoreMachine(RuleBasedStateMachine):
    """Add, fork (by n or beams), extend, abort, step, fail, let time pass, keep, pin and release."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        groups=st.sampled_from(sorted(GROUPS)),
        mode=st.sampled_from(["recompute", "swap", "auto"]),
        budget=st.sampled_from([1, 5, 32]),
        prefix_caching=st.booleans(),
        seconds_per_block=st.sampled_from([1e-6, 1e-3]),
        engine=st.builds(
            EngineSettings,
            policy=st.sampled_from(POLICIES),
            is_async=st.booleans(),
            drafting=st.sampled_from(["steady", "changing"]),
            most_drafts=st.integers(0, 3),
            drafts=st.builds(SimulatedDrafts, acceptance=st.sampled_from([0.0, 0.5, 1.0]), has_cache=st.booleans()),
        ),
    )
    def begin(
        self,
        block_size: int,
        groups: str,
        mode: str,
        budget: int,
        prefix_caching: bool,
        seconds_per_block: float,
        engine: EngineSettings,
    ) -> None:
        num_blocks = max(3, 16 // block_size) * len(GROUPS[groups])
        self.core = engine.core(
            num_blocks=num_blocks,
            block_size=block_size,
            groups=GROUPS[groups],
            budget=budget,
            max_num_seqs=4,
            max_model_len=MAX_MODEL_LEN,
            prefix_caching=prefix_caching,
            num_host_blocks=num_blocks // 2,
            preemption_mode=mode,
            costs=LinearCosts(per_swapped_block=seconds_per_block),
        )
        self.checked = CheckedCore(self.core)
        self.num_requests = 0

    # ---- arrivals

    @rule(
        prompt=TOKENS,
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 6),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "blue"]),
    )
    def add(self, prompt: list[int], n: int, max_tokens: int, priority: int, salt: str) -> None:
        sampling = SamplingParams(n=n, max_tokens=max_tokens, temperature=1.0 if n > 1 else 0.0, stop_token_ids=[1])
        self.submit(prompt, sampling, priority=priority, cache_salt=salt)

    @rule(prompt=TOKENS, width=st.integers(2, 4), max_tokens=st.integers(1, 5), early=st.sampled_from([True, False]))
    def add_beams(self, prompt: list[int], width: int, max_tokens: int, early: bool) -> None:
        sampling = SamplingParams(n=width - 1, max_tokens=max_tokens, temperature=0.0)
        args = {"width": width, "early_stopping": early}
        self.submit(prompt, sampling, decoding=DecodingSpec(method="beam_search", args=args), eos_token_ids=[1])

    @rule(prompt=TOKENS, keep=HANDLES, max_tokens=st.integers(1, 4))
    def add_to_be_kept(self, prompt: list[int], keep: str, max_tokens: int) -> None:
        self.submit(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), keep=keep)

    @rule(prompt=TOKENS, handle=HANDLES, keep=st.booleans())
    def go_on(self, prompt: list[int], handle: str, keep: bool) -> None:
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        self.submit(prompt[:3], sampling, continues=handle, keep=handle if keep else None)

    @rule(prompt=TOKENS, num_sent=st.integers(0, 3))
    def add_open(self, prompt: list[int], num_sent: int) -> None:
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        self.submit(prompt[:num_sent], sampling, rest=prompt[num_sent:], is_final=False)

    def submit(self, prompt: list[int], sampling: SamplingParams, rest: list[int] | None = None, **fields: Any) -> None:
        request = EngineRequest(request_id=self.num_requests, prompt_token_ids=prompt, sampling=sampling, **fields)
        self.checked.add(request, rest)
        self.num_requests += 1

    # ---- what happens to them

    def open_requests(self) -> list[int]:
        return sorted(number for number, plan in self.checked.plans.items() if plan.is_open)

    @precondition(lambda self: self.open_requests())
    @rule(data=st.data(), count=st.none() | st.integers(0, 2))
    def extend(self, data: st.DataObject, count: int | None) -> None:
        number = data.draw(st.sampled_from(self.open_requests()))
        self.checked.extend(number, count)

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data(), index=st.sampled_from([None, 0, 1]))
    def abort(self, data: st.DataObject, index: int | None) -> None:
        self.checked.abort(data.draw(st.integers(0, self.num_requests - 1)), index)

    @rule(pick=st.integers(0, 3))
    def fail(self, pick: int) -> None:
        self.checked.fail_row(pick)

    @rule(handle=HANDLES, num_tokens=st.integers(0, 6))
    def rewind(self, handle: str, num_tokens: int) -> None:
        self.checked.kept.rewind(handle, num_tokens)

    @rule(handle=HANDLES, into=HANDLES)
    def fork_kept(self, handle: str, into: str) -> None:
        self.checked.kept.fork(handle, into)

    @rule(handle=HANDLES, num_tokens=st.integers(1, 6))
    def pin(self, handle: str, num_tokens: int) -> None:
        self.checked.kept.pin(handle, num_tokens)

    @rule(handle=HANDLES)
    def release(self, handle: str) -> None:
        self.checked.kept.release(handle)

    @rule(seconds=st.floats(0, 10))
    def let_time_pass(self, seconds: float) -> None:
        self.core.clock.advance(seconds)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.checked.step()

    # ---- what always holds, beside what CheckedCore finds in each step

    @invariant()
    def blocks_rows_and_queues_are_consistent(self) -> None:
        if hasattr(self, "core"):
            self.core.scheduler.check_invariants()  # I1, I2, I3, I8
            self.checked.check_account()  # I20

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.checked.drain()  # I5, I9, I11


CoreMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
TestCore = CoreMachine.TestCase
