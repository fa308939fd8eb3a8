"""Random workloads on the checking executor: every invariant after every step, and every token as it must be.

The number of steps is QUIRE_RANDOM_STEPS (default 100,000 over 40 seeds).
"""

from __future__ import annotations

import os
import random

import pytest

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import AbortRequests, ExtendRequest, split_sequence_id
from quire.testing.checking_executor import expected_tokens
from quire.testing.core import FULL, CoreUnderTest

NUM_STEPS = int(os.environ.get("QUIRE_RANDOM_STEPS", "100000"))
NUM_SEEDS = 40
VOCAB = 50


class Workload:
    """Adds, extends and aborts requests at random and knows what each must produce."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        block_size = pick([1, 2, 4, 16])
        windows = pick([(0,), (0,), (5,), (0, 7), (9, 0, 9)])
        self.core = CoreUnderTest(
            num_blocks=pick([8, 12, 20, 48]) * len(windows) * (4 if block_size < 4 else 1),
            block_size=block_size,
            budget=pick([1, 3, 8, 17, 64]),
            max_num_seqs=pick([2, 4, 9]),
            max_model_len=60,
            groups=[KVGroup((f"layer{i}",), window) for i, window in enumerate(windows)] if windows != (0,) else [FULL],
            prefix_caching=pick([True, True, False]),
            vocab_size=VOCAB,
        )
        self.prompts: dict[int, list[int]] = {}
        self.params: dict[int, tuple[int, bool, int]] = {}  # max_tokens, is_greedy, seed
        self.open: dict[int, list[int]] = {}  # what has not been streamed yet
        self.aborted: set[int] = set()
        self.stems = [[self.random.randrange(VOCAB) for _ in range(30)] for _ in range(3)]

    def act(self) -> None:
        chance = self.random.random()
        if chance < 0.25 and len(self.core.scheduler.requests) < 12:
            self.add()
        elif chance < 0.45 and self.open:
            self.extend(self.random.choice(sorted(self.open)))
        elif chance < 0.48 and self.prompts:
            victim = self.random.choice(sorted(self.prompts))
            self.aborted.add(victim)
            self.open.pop(victim, None)
            self.core.core.abort(AbortRequests(request_ids=[victim]))

    def add(self) -> None:
        number = len(self.prompts)
        stem = self.random.choice(self.stems)[: self.random.randrange(1, 30)]
        prompt = stem + [self.random.randrange(VOCAB) for _ in range(self.random.randrange(6))]
        n = self.random.choice([1, 1, 1, 2])
        max_tokens = self.random.randrange(1, 25)
        is_greedy, seed = self.random.random() < 0.5, self.random.randrange(1000)
        self.prompts[number] = prompt
        self.params[number] = (max_tokens, is_greedy, seed)
        first = self.random.randrange(len(prompt)) if self.random.random() < 0.2 else len(prompt)
        if first < len(prompt):
            self.open[number] = prompt[first:]
        temperature = 0.0 if is_greedy else 1.0
        self.core.add(
            number,
            prompt[:first],
            is_final=first == len(prompt),
            n=n,
            max_tokens=max_tokens,
            seed=seed,
            temperature=temperature,
        )

    def extend(self, number: int) -> None:
        rest = self.open.pop(number)
        count = self.random.randrange(len(rest) + 1)
        is_final = count == len(rest)
        if not is_final:
            self.open[number] = rest[count:]
        self.core.core.extend(ExtendRequest(request_id=number, token_ids=rest[:count], is_final=is_final))

    def finish(self) -> None:
        for number in sorted(self.open):
            self.core.core.extend(ExtendRequest(request_id=number, token_ids=self.open.pop(number), is_final=True))
        self.core.run()

    def check(self) -> None:
        core = self.core
        assert core.pool.num_held == 0, "blocks are still held at the end"
        assert core.rows.num_free == core.rows.num_rows
        assert not core.scheduler.requests
        for sequence_id, end in core.ends.items():
            number, index = split_sequence_id(sequence_id)
            max_tokens, is_greedy, seed = self.params[number]
            tokens = core.tokens[sequence_id]
            own_seed = seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF
            expected = expected_tokens(
                self.prompts[number], max_tokens, vocab_size=VOCAB, seed=own_seed, is_greedy=is_greedy
            )
            if end.finish_reason == "length":
                assert tokens == expected[: min(max_tokens, 60 - len(self.prompts[number]))]
            else:
                assert end.finish_reason in {"abort", "error"}
                assert tokens == expected[: len(tokens)]
                assert number in self.aborted or end.error
        assert {number for number, _ in map(split_sequence_id, core.ends)} == set(self.prompts), "a request never ended"


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
