"""Random workloads for a core under test, which know what every request must produce."""

from __future__ import annotations

import random

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.messages import AbortRequests, ExtendRequest, sequence_id_of, split_sequence_id
from quire.testing.checking_executor import expected_tokens
from quire.testing.core import FULL, CoreUnderTest

VOCAB = 50


class Workload:
    """Adds, extends and aborts requests at random and knows what each must produce."""

    def __init__(self, seed: int, policy: str | SchedulingPolicy = "fifo") -> None:
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
            policy=policy,
        )
        self.prompts: dict[int, list[int]] = {}
        self.params: dict[int, tuple[int, bool, int]] = {}  # max_tokens, is_greedy, seed
        self.open: dict[int, list[int]] = {}  # what has not been streamed yet
        self.aborted: set[int] = set()
        self.stems = [[self.random.randrange(VOCAB) for _ in range(30)] for _ in range(3)]

    def act(self) -> None:
        """Perhaps something arrives, grows or is given up before the next step."""
        chance = self.random.random()
        if chance < 0.25 and len(self.core.scheduler.lifecycle.requests) < 12:
            self.add()
        elif chance < 0.45 and self.open:
            self.extend(self.random.choice(sorted(self.open)))
        elif chance < 0.48 and self.prompts:
            self.abort(self.random.choice(sorted(self.prompts)))

    def abort(self, victim: int) -> None:
        """The whole request, or one of its sequences."""
        self.aborted.add(victim)
        index = self.random.choice([None, 0, 1])
        if index != 1:
            self.open.pop(victim, None)  # while input is open there is no second sequence yet
        if index is None:
            self.core.core.abort(AbortRequests(request_ids=[victim]))
        else:
            self.core.core.abort(AbortRequests(sequence_ids=[sequence_id_of(victim, index)]))

    def add(self) -> None:
        number = len(self.prompts)
        stem = self.random.choice(self.stems)[: self.random.randrange(1, 30)]
        prompt = stem + [self.random.randrange(VOCAB) for _ in range(self.random.randrange(6))]
        n = self.random.choice([1, 1, 1, 2])
        max_tokens = self.random.randrange(1, 25)
        is_greedy, seed = self.random.random() < 0.5, self.random.randrange(1000)
        self.prompts[number] = prompt
        self.params[number] = (max_tokens, is_greedy, seed)
        first = self.random.randrange(len(prompt)) if self.random.random() < 0.2 else len(prompt)  # may be 0
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
        """Everything that was begun is brought to its end."""
        for number in sorted(self.open):
            self.core.core.extend(ExtendRequest(request_id=number, token_ids=self.open.pop(number), is_final=True))
        self.core.run()

    def check(self) -> None:
        """Every request ended once, with the tokens that it had to have, and nothing is held."""
        core = self.core
        assert core.pool.num_held == 0, "blocks are still held at the end"
        assert core.rows.num_free == core.rows.num_rows
        assert not core.scheduler.lifecycle.requests
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


def check_policy(policy: SchedulingPolicy, *, num_seeds: int = 6, num_steps: int = 150) -> None:
    """The contract of a policy: nobody is lost, nothing leaks, tokens do not depend on the order, runs repeat.

    The core checks after every step that the budget is kept and that blocks, rows and queues are consistent.
    """
    for seed in range(num_seeds):
        logs = []
        for _ in range(2):
            workload = Workload(seed, policy)
            log = []
            for _ in range(num_steps):
                workload.act()
                log.append(workload.core.step().sequence_ids.tolist())
            workload.finish()
            workload.check()
            logs.append(log)
        assert logs[0] == logs[1], f"seed {seed}: the same calls gave another schedule"
