"""The simulated executor itself: it answers as it says, notices what is wrong, and keeps time."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.support.executor_driver import Messages, admitted, forked

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import AppendedTokens, Candidates, SchedulerOutput, int_array
from quire.simulation.costs.linear import LinearCosts
from quire.testing.core import FULL, CoreUnderTest
from quire.testing.simulator.checking_model import (
    END_TOKEN,
    expected_tokens,
    extended,
    log_probabilities,
    next_token,
    next_tokens,
    prefix_hashes,
)
from quire.testing.simulator.executor import SimulatedClock, SimulatedExecutor

PROMPT = [5, 6, 7, 8, 9, 10]


# ---- the model


def test_columns_say_the_same_as_single_numbers() -> None:
    hashes = np.array(prefix_hashes(PROMPT), dtype=np.uint64)
    assert extended(hashes[:-1], int_array(PROMPT[1:])).tolist() == hashes[1:].tolist()
    seeds = np.arange(len(PROMPT), dtype=np.uint64) * np.uint64(2**62 + 1)
    is_greedy = np.array([True, False] * 3)
    singly = [next_token(*each, 50) for each in zip(hashes.tolist(), seeds.tolist(), is_greedy.tolist(), strict=True)]
    assert next_tokens(hashes, seeds, is_greedy, 50).tolist() == singly


def test_distributions_are_what_makes_beams_interesting() -> None:
    hashes = np.array(prefix_hashes(range(2000)), dtype=np.uint64)
    logprobs = log_probabilities(hashes, np.ones(len(hashes)), 50)
    assert np.allclose(np.exp(logprobs).sum(axis=1), 1)
    best = np.sort(logprobs, axis=1)[:, ::-1]
    gaps = best[:, 0] - best[:, 1]
    assert gaps.min() > 0, "two tokens are never equal"
    assert (gaps < 0.001).mean() > 0.05, "some are nearly so"
    assert (gaps > 0.5).mean() > 0.02, "some stand out"
    is_near_top = np.argsort(np.argsort(-logprobs, axis=1), axis=1)[:, END_TOKEN] < 6
    assert 0.15 < is_near_top.mean() < 0.5, "an end now and then"


def test_a_temperature_divides_the_logits() -> None:
    hashes = np.array(prefix_hashes(PROMPT), dtype=np.uint64)
    plain, half, zero = (log_probabilities(hashes, np.full(len(PROMPT), t), 50) for t in (1.0, 0.5, 0.0))
    doubled = 2 * plain - np.log(np.exp(2 * plain).sum(axis=1, keepdims=True))
    assert np.allclose(half, doubled)
    assert np.array_equal(zero, plain)


# ---- what it answers


def test_a_row_samples_once_all_its_tokens_are_computed() -> None:
    run = Messages()
    output = run.step({0: 4}, {0: [3, 9]}, admitted=[admitted(0, PROMPT)])
    assert len(output.rows) == 0
    tokens = [int(run.step({0: count}).token_ids[0]) for count in (2, 1, 1)]
    assert tokens == expected_tokens(PROMPT, 3, vocab_size=50)


def test_a_row_whose_next_token_the_core_chooses_answers_with_candidates() -> None:
    run = Messages()
    output = run.step({0: 6}, {0: [3, 9]}, admitted=[admitted(0, PROMPT, num_candidates=5)])
    assert len(output.rows) == 0
    found: Candidates = output.candidates[0]
    assert len(set(found.token_ids)) == 5
    assert all(a > b for a, b in pairwise(found.logprobs))
    choice = AppendedTokens(row=0, token_ids=[found.token_ids[2]])
    again = run.step({0: 1}, appended=[choice]).candidates[0]
    hashes = np.array(prefix_hashes([*PROMPT, found.token_ids[2]])[-1:], dtype=np.uint64)
    logprobs = log_probabilities(hashes, np.ones(1), 50)[0]
    assert math.isclose(again.logprobs[0], logprobs.max())
    assert again.token_ids[0] == logprobs.argmax()


def test_as_many_candidates_as_there_are_tokens() -> None:
    run = Messages(vocab_size=3)
    output = run.step({0: 2}, {0: [1]}, admitted=[admitted(0, [1, 2], num_candidates=8)])
    assert sorted(output.candidates[0].token_ids) == [0, 1, 2]


def test_a_row_that_fails_answers_nothing_else() -> None:
    run = Messages()
    run.executor.failing_rows[0] = "asked for"
    output = run.step({0: 6}, {0: [3, 9]}, admitted=[admitted(0, PROMPT)])
    assert output.failures == {0: "asked for"}
    assert len(output.rows) == 0
    assert run.executor.failing_rows == {}


def test_open_input_is_computed_but_not_sampled() -> None:
    run = Messages()
    assert len(run.step({0: 3}, {0: [3, 9]}, admitted=[admitted(0, PROMPT[:3], is_final=False)]).rows) == 0
    rest = AppendedTokens(row=0, token_ids=PROMPT[3:], is_final=True)
    assert run.step({0: 3}, appended=[rest]).token_ids.tolist() == expected_tokens(PROMPT, 1, vocab_size=50)


def test_a_fork_brings_its_parents_tables_and_may_lie_on_an_old_row() -> None:
    run = Messages()
    run.step({0: 6, 1: 2}, {0: [3, 9], 1: [4]}, admitted=[admitted(0, PROMPT), admitted(1, [1, 2])])
    child = forked(0, 1, 7, 6)  # row 1 was freed without a word
    output = run.step({0: 1, 1: 1}, {1: [3, 8]}, forked=[child], block_copies=[(9, 8)])
    assert output.token_ids[0] == output.token_ids[1]


# ---- what it notices


BLOCKS = {0: [3, 9]}


def begin(run: Messages) -> None:
    run.step({0: 6}, BLOCKS, admitted=[admitted(0, PROMPT)])


MISTAKES: dict[str, Callable[[Messages], Any]] = {
    "wrong content": lambda run: (run.executor.cache.spoil(3, 1), run.step({0: 1})),
    "wrong content, of a free block": lambda run: (run.executor.poison([3]), run.step({0: 1})),
    "wrong content, in a block that was begun anew": lambda run: run.step(
        {0: 1, 1: 1}, {1: [3]}, admitted=[admitted(1, [1])]
    ),
    "wrong content, not copied": lambda run: run.step({1: 1}, {1: [3, 8]}, forked=[forked(0, 1, 6, 5)]),
    "wrong content, of a prefix that is not there": lambda run: run.step(
        {1: 1}, {1: [7, 8]}, admitted=[admitted(1, PROMPT, num_computed_tokens=5)]
    ),
    "wrong content, swapped to another place": lambda run: run.step(
        {0: 1}, {0: [1, 2]}, swapped_out=[(3, 0), (9, 1)], swapped_in=[(0, 2), (1, 1)]
    ),
    "wrong content, never swapped out": lambda run: run.step({0: 1}, {0: [1, 9]}, swapped_in=[(0, 1)]),
    "no block": lambda run: run.step({1: 6}, {1: [4]}, admitted=[admitted(1, PROMPT)]),
    "nobody is there": lambda run: run.step({0: 1}, released=[0]),
    "still used": lambda run: run.step({0: 1}, {0: [1]}, admitted=[admitted(0, [1])]),
    "more tokens than there are": lambda run: run.step({0: 3}),
    "granted nothing": lambda run: run.step({0: 0}),
    "copied and overwritten": lambda run: run.step({0: 1}, block_copies=[(3, 4), (4, 5)]),
    "two copies into one": lambda run: run.step({0: 1}, block_copies=[(3, 4), (9, 4)]),
    "out to one host block": lambda run: run.step({0: 1}, swapped_out=[(3, 0), (9, 0)]),
    "swapped into one block": lambda run: run.step({0: 1}, swapped_out=[(3, 0), (9, 1)], swapped_in=[(0, 5), (1, 5)]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed_in_its_step(mistake: str) -> None:
    run = Messages(num_host_blocks=4)
    begin(run)
    with pytest.raises(AssertionError, match=mistake.split(",")[0]):
        MISTAKES[mistake](run)


def test_what_is_moved_well_is_read_well() -> None:
    run = Messages(num_host_blocks=4)
    begin(run)
    run.step({0: 1}, {0: [1, 2]}, swapped_out=[(3, 0), (9, 1)], swapped_in=[(0, 1), (1, 2)])
    # out and in by the same host block: out comes first
    run.step({0: 1}, {0: [5, 2]}, swapped_out=[(1, 0)], swapped_in=[(0, 5)])
    assert len(run.step({0: 1}, {0: [5, 2, 7]}).rows) == 1


def test_a_group_cannot_read_another_groups_blocks() -> None:
    executor = SimulatedExecutor([KVGroup(("a",)), KVGroup(("b",))], 8, 4)
    writes = int_array([(0, 0, 0, 1), (1, 0, 0, 2)]).T
    step = SchedulerOutput(
        step=1, admitted=[admitted(0, [1])], block_writes=writes, rows=int_array([0]), num_tokens=int_array([1])
    )
    executor.execute(step)
    swapped = SchedulerOutput(
        step=2, block_writes=int_array([(0, 0, 0, 2)]).T, rows=int_array([0]), num_tokens=int_array([1])
    )
    with pytest.raises(AssertionError, match="wrong content"):
        executor.execute(swapped)


def test_only_the_window_is_read() -> None:
    executor = SimulatedExecutor([KVGroup(("a",), 3)], 8, 1)
    writes = int_array([(0, 0, i, i) for i in range(6)]).T
    step = SchedulerOutput(
        step=1, admitted=[admitted(0, PROMPT)], block_writes=writes, rows=int_array([0]), num_tokens=int_array([6])
    )
    executor.execute(step)
    executor.poison([0, 1, 2, 3])
    following = SchedulerOutput(
        step=2, block_writes=int_array([(0, 0, 6, 6)]).T, rows=int_array([0]), num_tokens=int_array([1])
    )
    executor.execute(following)
    executor.poison([5])
    with pytest.raises(AssertionError, match=r"positions \[5\]"):
        executor.execute(
            SchedulerOutput(
                step=3, block_writes=int_array([(0, 0, 7, 7)]).T, rows=int_array([0]), num_tokens=int_array([1])
            )
        )


# ---- the clock


def test_a_step_takes_what_its_parts_cost() -> None:
    costs = LinearCosts(
        per_step=1.0,
        per_token=0.1,
        per_context_token=0.01,
        per_swapped_block=0.5,
        per_copied_block=0.25,
    )
    run = Messages(num_host_blocks=4, costs=costs)
    begin(run)
    assert math.isclose(run.executor.clock.now(), 1.0 + 6 * 0.1 + 6 * 0.01)
    before = run.executor.clock.now()
    run.step({0: 1}, {0: [1, 9]}, swapped_out=[(3, 0)], swapped_in=[(0, 1)], block_copies=[(9, 4)])
    assert math.isclose(run.executor.clock.now() - before, 1.0 + 0.1 + 7 * 0.01 + 2 * 0.5 + 0.25)


def test_several_executors_may_share_a_clock() -> None:
    clock = SimulatedClock()
    cores = [SimulatedExecutor([FULL], 4, 4, clock=clock) for _ in range(2)]
    for executor in cores:
        executor.execute(
            SchedulerOutput(
                step=1,
                admitted=[admitted(0, [1])],
                block_writes=int_array([(0, 0, 0, 1)]).T,
                rows=int_array([0]),
                num_tokens=int_array([1]),
            )
        ).result()
    clock.advance(5.0)
    assert cores[0].clock.now() == cores[1].clock.now() > 5.0


def test_the_prices_of_a_core_are_those_of_its_clock() -> None:
    core = CoreUnderTest(costs=LinearCosts(per_swapped_block=0.125))
    assert core.core.control("worker.measure_swap", {}) == 0.125


# ---- a whole core on it


def test_a_core_notices_a_wrong_cell() -> None:
    core = CoreUnderTest(block_size=4)
    core.add(1, list(range(10)), max_tokens=5)
    core.step()
    block = core.scheduler.running.living_sequences()[0].block_tables[0][1]
    core.executor.cache.spoil(block, 2)
    with pytest.raises(AssertionError, match="wrong content at positions"):
        core.run()
