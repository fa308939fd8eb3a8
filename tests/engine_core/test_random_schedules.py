"""Random workloads on the checking executor: every invariant after every step, and every token as it must be.

The number of steps is QUIRE_RANDOM_STEPS (default 100,000 over 40 seeds).
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from quire.engine_core.scheduler.policies.fifo import Fifo
from quire.messages import AbortRequests
from quire.testing.checking_executor import expected_tokens
from quire.testing.core import CoreUnderTest
from quire.testing.workload import VOCAB, Workload, check_policy

NUM_STEPS = int(os.environ.get("QUIRE_RANDOM_STEPS", "100000"))
NUM_SEEDS = 40


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_invariants_and_tokens_over_random_schedules(seed: int) -> None:
    workload = Workload(seed)
    for _ in range(NUM_STEPS // NUM_SEEDS):
        workload.act()
        workload.core.step()
    workload.finish()
    workload.check()


def test_the_same_calls_give_the_same_schedule() -> None:
    logs = []
    for _ in range(2):
        workload = Workload(7)
        log = []
        for _ in range(150):
            workload.act()
            outputs = workload.core.step()
            log.append((outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), repr(outputs.ends)))
        logs.append(log)
    assert logs[0] == logs[1]


def test_the_checking_model_notices_a_wrong_block() -> None:
    workload = CoreUnderTest(block_size=4)
    workload.add(1, list(range(10)), max_tokens=5)
    workload.step()
    workload.executor._cells[workload.scheduler.running.living_sequences()[0].block_tables[0][1], 2] ^= 1
    with pytest.raises(AssertionError, match="wrong content at positions"):
        workload.run()


def test_fifo_keeps_the_contract_of_a_policy() -> None:
    check_policy(Fifo())


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis drives a small core, so that a failure comes as a short list of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.core = CoreUnderTest(num_blocks=9, block_size=2, budget=5, max_num_seqs=3, max_model_len=12)
        self.prompts: dict[int, tuple[list[int], int]] = {}

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=8), n=st.integers(1, 2), max_tokens=st.integers(1, 6))
    def add(self, prompt: list[int], n: int, max_tokens: int) -> None:
        number = len(self.prompts)
        self.prompts[number] = (prompt, max_tokens)
        self.core.add(number, prompt, n=n, max_tokens=max_tokens)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.prompts)))
        self.core.core.abort(AbortRequests(request_ids=[number]))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.core.step()

    def teardown(self) -> None:
        self.core.run()
        assert self.core.pool.num_held == 0
        for sequence_id, end in self.core.ends.items():
            prompt, max_tokens = self.prompts[sequence_id >> 10]
            tokens = self.core.tokens[sequence_id]
            expected = expected_tokens(prompt, max_tokens, vocab_size=VOCAB)
            assert tokens == expected[: len(tokens)]
            assert end.finish_reason != "length" or len(tokens) == min(max_tokens, 12 - len(prompt))


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestScheduler = SchedulerMachine.TestCase
