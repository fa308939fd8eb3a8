"""What every policy must keep, and what each one promises. On the simulator, which checks every token that is read."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.engine_core.scheduler.policies import make_policy
from quire.messages import AbortRequests, SchedulerOutput, split_sequence_id
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checking_model import expected_tokens
from quire.testing.simulator.workload import Workload
from quire.testing.waiting_bound import steps_to_first_token

POLICIES = ["fifo", "priority", "srtf", "two_level", "bounded_srtf"]
every_policy = pytest.mark.parametrize("policy", POLICIES)
synchronous_or_not = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@dataclass
class Observed:
    """A core, what each step granted to whom, and when each request had its first token."""

    core: CoreUnderTest
    grants: list[dict[int, int]] = field(default_factory=list)
    first_token_step: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core.executor.observers.append(self._observe)

    def _observe(self, output: SchedulerOutput) -> None:
        rows, num_tokens = output.rows.tolist(), output.num_tokens.tolist()
        assert sum(num_tokens) <= self.core.scheduler.max_num_batched_tokens, "more than the budget"
        assert len(set(rows)) == len(rows), "a row is granted twice"
        assert all(count > 0 for count in num_tokens), "a grant of nothing"
        by_request: dict[int, int] = {}
        for row, count in zip(rows, num_tokens, strict=True):
            request_id = self.core.scheduler.running.sequence_at(row).request.request_id
            by_request[request_id] = by_request.get(request_id, 0) + count
        self.grants.append(by_request)

    def step(self) -> None:
        outputs = self.core.step()
        for sequence_id in outputs.sequence_ids.tolist():
            self.first_token_step.setdefault(split_sequence_id(sequence_id)[0], len(self.grants))

    def run(self, max_steps: int = 5_000) -> None:
        for _ in range(max_steps):
            if not self.core.core.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def order_of_first_tokens(self) -> list[int]:
        return sorted(self.first_token_step, key=lambda number: (self.first_token_step[number], number))


def observed(policy: str, *, progress_share: float = 0.1, staging_size: int = 8, **limits: Any) -> Observed:
    options = {"staging_size": staging_size, "progress_share": progress_share}
    return Observed(CoreUnderTest(policy=policy, policy_options=options, **limits))


def prompt_of(number: int, length: int) -> list[int]:
    """Of length 1 or more; two of them differ from the first token on, so that nobody finds anything cached."""
    return [number % 50, *((7 * number + place) % 50 for place in range(length - 1))]


# ---------------------------------------------------------------------------------------------- every policy


@every_policy
@pytest.mark.parametrize("seed", range(4))
def test_random_workloads(policy: str, seed: int) -> None:
    logs = []
    for _ in range(2):
        workload = Workload(seed, make_policy(policy))
        logs.append([workload.step() for _ in range(150)])
        workload.finish()  # everybody ends, and nothing is held
    assert logs[0] == logs[1], "the same calls gave another schedule"


def crowded(policy: str, seed: int, *, is_async: bool = False) -> Observed:
    """Requests of all sizes and three priorities come over time, into few blocks and rows; some are aborted."""
    chance = random.Random(seed)
    seen = observed(policy, num_blocks=14, block_size=4, budget=16, max_num_seqs=5, is_async=is_async)
    for number in range(40):
        length, num_output = chance.choice([1, 3, 5, 9, 30]), chance.randint(1, 12)
        seen.core.add(
            number, prompt_of(number, length), max_tokens=num_output, request={"priority": chance.randint(0, 2)}
        )
        if number % 10 == 9:
            seen.core.core.abort(AbortRequests(request_ids=[number - chance.randint(0, 5)]))
        for _ in range(chance.randint(0, 3)):
            if seen.core.core.has_work:
                seen.step()
    seen.run()
    return seen


@every_policy
@synchronous_or_not
@pytest.mark.parametrize("seed", range(3))
def test_everybody_ends_and_nothing_leaks(policy: str, seed: int, is_async: bool) -> None:
    core = crowded(policy, seed, is_async=is_async).core
    assert {split_sequence_id(sequence_id)[0] for sequence_id in core.ends} == set(range(40))
    assert {end.finish_reason for end in core.ends.values()} <= {"length", "abort"}
    assert core.scheduler.statistics()["num_preemptions_total"] > 0, "the test is meant to be crowded"
    core.assert_empty()


@every_policy
@synchronous_or_not
def test_the_same_requests_give_the_same_schedule(policy: str, is_async: bool) -> None:
    assert crowded(policy, 5, is_async=is_async).grants == crowded(policy, 5, is_async=is_async).grants


@every_policy
@synchronous_or_not
def test_tokens_do_not_depend_on_the_policy(policy: str, is_async: bool) -> None:
    seen = observed(policy, num_blocks=14, budget=8, max_num_seqs=4, is_async=is_async)
    for number in range(9):
        seen.core.add(number, prompt_of(number, 1 + 5 * (number % 4)), max_tokens=12)
    seen.run()
    for sequence_id, tokens in seen.core.tokens.items():
        number = split_sequence_id(sequence_id)[0]
        assert tokens == expected_tokens(prompt_of(number, 1 + 5 * (number % 4)), 12, vocab_size=50)


@every_policy
def test_a_budget_smaller_than_the_number_of_rows(policy: str) -> None:
    seen = observed(policy, budget=3, max_num_seqs=8)
    for number in range(12):
        seen.core.add(number, prompt_of(number, 1 + number % 5), max_tokens=6)
    seen.run()
    assert [len(tokens) for tokens in seen.core.tokens.values()] == [6] * 12


@every_policy
def test_an_id_may_be_used_again_at_once(policy: str) -> None:
    """The new request is another one: nothing that a policy keeps of the first may bring it back."""
    seen = observed(policy, max_num_seqs=1)
    seen.core.add(0, prompt_of(0, 4), max_tokens=8)
    for number in (1, 2, 3):
        seen.core.add(number, prompt_of(number, 5 + number), max_tokens=2)
    seen.step()
    seen.core.core.abort(AbortRequests(request_ids=[2]))
    seen.step()
    seen.core.ends.clear()
    seen.core.add(2, prompt_of(7, 9), max_tokens=3)
    seen.run()
    assert len(seen.core.ends) == 4
    assert seen.core.tokens[2 << 10] == expected_tokens(prompt_of(7, 9), 3, vocab_size=50)
    seen.core.assert_empty()


# ---------------------------------------------------------------------------------------------- who goes first


def test_fifo_serves_in_the_order_of_arrival() -> None:
    seen = observed("fifo", budget=10, max_model_len=128)
    for number, length in enumerate([35, 2, 20, 1]):
        seen.core.add(number, prompt_of(number, length), max_tokens=1)
    seen.run()
    assert seen.order_of_first_tokens() == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", ["srtf", "two_level", "bounded_srtf"])
def test_the_shorter_go_first(policy: str) -> None:
    seen = observed(policy, budget=10, max_model_len=128)
    for number, length in enumerate([35, 9, 20, 8]):
        seen.core.add(number, prompt_of(number, length), max_tokens=1)
    seen.run()
    assert seen.order_of_first_tokens() == [3, 1, 2, 0]


def test_what_remains_counts_not_the_length_of_the_prompt() -> None:
    """4.5.2: nearly done is short, and so is what the prefix cache has."""
    seen = observed("srtf", budget=20, max_model_len=128)
    seen.core.add(0, prompt_of(0, 45), max_tokens=1)
    seen.step()
    seen.step()
    seen.core.add(1, prompt_of(1, 8), max_tokens=1)
    seen.step()
    assert seen.grants[-1] == {0: 5, 1: 8}
    seen.core.add(2, prompt_of(2, 30), max_tokens=1)
    seen.core.add(3, [*prompt_of(0, 44), 1, 2, 3], max_tokens=1)  # longer, but all but three tokens are cached
    seen.step()
    assert seen.grants[-1][3] == 3
    assert seen.grants[-1][2] == 17


def test_decoding_goes_before_prompts() -> None:
    """4.5.2: nothing names it; one token remains, which is less than any prompt has."""
    for policy in ("srtf", "two_level", "bounded_srtf"):
        seen = observed(policy, budget=4, max_num_seqs=8, progress_share=0.0)
        for number in range(3):
            seen.core.add(number, [number + 1], max_tokens=8)
        seen.step()
        seen.core.add(3, prompt_of(3, 20), max_tokens=1)
        for _ in range(4):
            seen.step()
            assert seen.grants[-1] == {0: 1, 1: 1, 2: 1, 3: 1}


def test_staging_is_refilled_only_when_it_is_empty() -> None:
    """4.5.3: shorter ones that come later wait until all of the batch before them have started."""
    seen = observed("two_level", budget=10, staging_size=3, progress_share=0.0, max_num_seqs=8, max_model_len=128)
    for number, length in enumerate([30, 20, 10, 2, 1, 3]):
        seen.core.add(number, prompt_of(number, length), max_tokens=1)
    seen.step()
    assert seen.grants[-1] == {2: 10}
    for _ in range(2):
        seen.step()
        assert seen.grants[-1] == {1: 10}
    seen.step()
    assert seen.grants[-1] == {0: 10}
    seen.step()  # staging is empty now, and the three of the next batch are shorter than what remains
    assert seen.grants[-1] == {0: 4, 3: 2, 4: 1, 5: 3}


# ---------------------------------------------------------------------------------------------- priorities


@pytest.mark.parametrize("policy", ["priority", "two_level", "bounded_srtf"])
def test_the_more_important_go_strictly_first(policy: str) -> None:
    seen = observed(policy, budget=10, progress_share=0.0, max_model_len=128)
    for number, (length, priority) in enumerate([(8, 2), (30, 1), (8, 1), (9, 0), (31, 0)]):
        seen.core.add(number, prompt_of(number, length), max_tokens=1, request={"priority": priority})
    seen.run()
    order = seen.order_of_first_tokens()
    assert set(order[:2]) == {3, 4}
    assert set(order[2:4]) == {1, 2}
    assert order[4] == 0


@pytest.mark.parametrize("policy", ["priority", "two_level", "bounded_srtf"])
def test_an_important_request_pushes_others_out_of_their_rows(policy: str) -> None:
    seen = observed(policy, max_num_seqs=2)
    for number in (0, 1):
        seen.core.add(number, prompt_of(number, 6), max_tokens=30, request={"priority": 1})
    for _ in range(3):
        seen.step()
    seen.core.add(2, prompt_of(2, 6), max_tokens=4)
    seen.step()
    assert 2 in seen.grants[-1], "it waits for a row that less important requests hold"
    seen.run()
    assert seen.core.scheduler.statistics()["num_preemptions_total"] >= 1
    assert [len(tokens) for tokens in seen.core.tokens.values()] == [30, 30, 4]
    for number in (0, 1):
        assert seen.core.tokens[number << 10] == expected_tokens(prompt_of(number, 6), 30, vocab_size=50)
    seen.core.assert_empty()


@pytest.mark.parametrize("policy", ["priority", "two_level", "bounded_srtf"])
def test_an_important_request_pushes_others_out_of_their_blocks(policy: str) -> None:
    seen = observed(policy, num_blocks=10, block_size=4, max_model_len=40)
    for number in (0, 1):
        seen.core.add(number, prompt_of(number, 18), max_tokens=2, request={"priority": 1})
    seen.step()
    seen.core.add(2, prompt_of(2, 30), max_tokens=2)
    seen.step()
    assert 2 in seen.grants[-1], "it waits for blocks that less important requests hold"
    seen.run()
    assert seen.first_token_step[2] < max(seen.first_token_step[0], seen.first_token_step[1]) + 20
    assert seen.core.scheduler.statistics()["num_preemptions_total"] >= 1
    seen.core.assert_empty()


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_are_not_pushed_out(policy: str) -> None:
    seen = observed(policy, max_num_seqs=2)
    for number in range(4):
        seen.core.add(number, prompt_of(number, 6), max_tokens=10)
    seen.run()
    assert seen.core.scheduler.statistics()["num_preemptions_total"] == 0


@pytest.mark.parametrize("policy", ["priority", "two_level", "bounded_srtf"])
@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
def test_the_greatest_and_the_smallest_priority(policy: str, priority: int) -> None:
    seen = observed(policy, budget=10)
    seen.core.add(0, prompt_of(0, 30), max_tokens=4)
    seen.core.add(1, prompt_of(1, 30), max_tokens=4, request={"priority": priority})
    seen.run()
    assert seen.order_of_first_tokens() == ([1, 0] if priority < 0 else [0, 1])


# ---------------------------------------------------------------------------------------------- who waits how long


# as long as the budget: a batch of them fills several steps, and leaves nothing for a long prompt that has started
SHORT, LONG = 40, 200
LIMITS = {"budget": 40, "num_blocks": 300, "block_size": 4, "max_num_seqs": 16, "max_model_len": 256}


def stream(policy: str, num_steps: int, **options: float) -> Observed:
    """A long prompt, and from the first step on more short ones than the budget has tokens for."""
    seen = observed(policy, **options, **LIMITS)
    seen.core.add(0, prompt_of(0, LONG), max_tokens=1)
    number = 1
    for _ in range(num_steps):
        while len(seen.core.scheduler.queues) < 12:
            seen.core.add(number, prompt_of(number, SHORT), max_tokens=2)
            number += 1
        seen.step()
    return seen


@pytest.mark.parametrize("num_steps", [100, 300])
def test_the_wait_under_two_level_has_a_bound(num_steps: int) -> None:
    seen = stream("two_level", num_steps)
    bound = steps_to_first_token(
        LONG, [], budget=LIMITS["budget"], num_rows=LIMITS["max_num_seqs"], longest_after=SHORT
    )
    assert bound < 100, "the stream lasts longer than that, or it would show nothing"
    assert seen.first_token_step[0] <= bound


def test_without_progress_share_it_has_none() -> None:
    """4.5.3 as it is worded bounds the time to the first chunk alone."""
    seen = stream("two_level", 300, progress_share=0.0)
    assert any(0 in granted for granted in seen.grants), "it has started"
    assert 0 not in seen.first_token_step


def test_srtf_starves_a_long_prompt() -> None:
    seen = stream("srtf", 300)
    assert 0 not in seen.first_token_step


def test_fifo_does_not() -> None:
    assert stream("fifo", 20).first_token_step[0] == LONG / LIMITS["budget"]


@pytest.mark.parametrize("seed", range(4))
def test_everybody_waits_within_the_bound(seed: int) -> None:
    """Prompts of all lengths at random moments; rows and blocks are free, as the bound asks."""
    chance = random.Random(seed)
    limits = {**LIMITS, "num_blocks": 4000, "max_num_seqs": 24}
    seen = observed("two_level", staging_size=3, **limits)
    lengths: dict[int, int] = {}
    bounds: dict[int, int] = {}
    arrivals: dict[int, int] = {}
    for _ in range(60):
        for _ in range(chance.choice([0, 0, 1, 2])):
            number = len(lengths)
            ahead = [length for other, length in lengths.items() if other not in seen.first_token_step]
            if len(ahead) > 20:
                continue
            lengths[number] = chance.choice([1, 5, 20, 60, 200])
            bounds[number] = steps_to_first_token(
                lengths[number], ahead, budget=40, num_rows=24, longest_after=200, staging_size=3
            )
            arrivals[number] = len(seen.grants)
            seen.core.add(number, prompt_of(number, lengths[number]), max_tokens=3)
        if seen.core.core.has_work:
            seen.step()
    seen.run()
    assert len(lengths) > 20
    for number, bound in bounds.items():
        assert seen.first_token_step[number] - arrivals[number] <= bound


@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_overtaken_by_more_than_a_share_of_the_line(seed: int) -> None:
    """bounded_srtf: by at most 0.7 of the most that have waited at once, though short ones come without end."""
    chance = random.Random(seed)
    seen = observed("bounded_srtf", **{**LIMITS, "num_blocks": 4000, "max_num_seqs": 24})
    queues = seen.core.scheduler.queues
    most_waiting = [0]
    started: dict[int, int] = {}
    for number in range(400):
        seen.core.add(number, prompt_of(number, chance.choice([1, 20, 30, 100, 200])), max_tokens=2)
        while len(queues) > 12 or (number == 399 and seen.core.core.has_work):
            most_waiting.append(max(most_waiting[-1], len(queues)))
            seen.step()
            for request in seen.grants[-1]:
                started.setdefault(request, len(seen.grants))
    assert len(started) == 400
    overtaken = {
        number: sum(started[later] < started[number] for later in range(number + 1, 400)) for number in range(400)
    }
    for number, count in overtaken.items():
        assert count <= math.ceil(0.7 * most_waiting[started[number]])
    assert max(overtaken.values()) > 4, "nothing was shown"


@pytest.mark.parametrize("num_steps", [100, 300])
def test_the_wait_under_bounded_srtf_has_a_bound(num_steps: int) -> None:
    seen = stream("bounded_srtf", num_steps)
    most_overtakers = math.ceil(0.7 * 12)
    to_start = -(-(most_overtakers * SHORT + LONG) // (LIMITS["budget"] - LIMITS["max_num_seqs"])) + 1
    bound = to_start + -(-LONG // (LIMITS["budget"] // 10))
    assert bound < 100, "the stream lasts longer than that, or it would show nothing"
    assert seen.first_token_step[0] <= bound


def test_what_is_known_of_a_long_line_stays_in_proportion_to_it() -> None:
    """While somebody always waits, nothing begins anew; those that have gone are forgotten all the same."""
    policy = make_policy("bounded_srtf")
    seen = Observed(CoreUnderTest(policy=policy, **LIMITS))
    for number in range(2000):
        seen.core.add(number, prompt_of(number, 10 + number % 30), max_tokens=1)
        while len(seen.core.scheduler.queues) > 60:
            seen.step()
    (known,) = policy._seen.values()
    assert known.num_arrived > 1900
    assert len(known.shortest) <= 2 * 61 + 64
    assert len(known.places) <= 2 * 61 + 64
