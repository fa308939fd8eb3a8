"""The budget of a step beside answers that are read: what it is worth, and what it may not do."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from quire.config.option import parse_seconds
from quire.engine_core.scheduler.constraints import OneStepAtATime
from quire.engine_core.scheduler.step_budget import StepBudget
from quire.errors import OptionError
from quire.messages import LayerSpec, sequence_id_of
from quire.simulation.costs.linear import LinearCosts
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.workload import Workload

COSTS = LinearCosts(per_step=0.030, per_token=0.001)
POLICIES = ["fifo", "priority", "srtf", "two_level", "bounded_srtf"]


def core_with(target: float, **options) -> CoreUnderTest:
    sizes = {"num_blocks": 400, "block_size": 4, "max_num_seqs": 8, "max_model_len": 800, "budget": 512}
    return CoreUnderTest(**{**sizes, "costs": COSTS, "target_seconds": target, **options})


def lengths_of_steps(core: CoreUnderTest, sequence_id: int) -> list[float]:
    """Seconds between the tokens of an answer, until all have ended; of one that has begun, the last has just come."""
    times = [core.clock.now()] if core.tokens[sequence_id] else []
    while core.core.has_work:
        outputs = core.step()
        if sequence_id in outputs.sequence_ids.tolist():
            times.append(core.clock.now())
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize(
    ("num_streaming", "num_tokens"),
    # 31 ms for one token and 1 for each further one: 19 ms are left of 50
    [(0, 512), (1, 20), (4, 20), (16, 20), (17, 21), (100, 104), (600, 512)],
)
def test_as_many_tokens_as_fit_into_the_time(num_streaming: int, num_tokens: int) -> None:
    assert StepBudget(512, 0.050, 0.031, 0.001, least=4).tokens(num_streaming) == num_tokens


def test_a_step_may_be_so_many_times_as_long_as_without_prompts() -> None:
    budget = StepBudget.by_prices(4096, None, 0.031, 0.001)
    # four times 31 ms for one row; with 100 of them, 130 ms, twice that
    assert [budget.tokens(number) for number in (0, 1, 100)] == [4096, 94, 230]


def test_without_prices_or_a_target_nothing_is_cut() -> None:
    assert StepBudget(512, 0.050).tokens(3) == 512
    assert StepBudget(512, 0.0, 0.031, 0.001).tokens(3) == 512


@pytest.mark.parametrize("price", [5e-324, 1e-300, 1e15])
def test_a_price_that_no_token_has_ends_no_engine(price: float) -> None:
    """The record of earlier starts is a file, and may say anything."""
    for seconds in (1e-300, 0.05, 3600.0, None):
        budget = StepBudget.by_prices(512, seconds, 0.031, price, 1e9)
        assert 4 <= budget.tokens(3) <= 512
        assert np.isfinite(budget.weights(np.array([0, 1 << 30]))).all()


def test_a_token_counts_more_for_those_that_it_sees() -> None:
    layers = [
        LayerSpec(name=str(number), num_kv_heads=1, key_dim=8, value_dim=8, bytes_per_element=2, sliding_window=window)
        for number, window in enumerate((0, 100, 100, 100))
    ]
    states = LayerSpec(name="state", num_kv_heads=0, key_dim=0, value_dim=0, bytes_per_element=0, state_bytes=64)
    num_before = np.array([0, 100, 900])
    budget = StepBudget.by_prices(512, 0.050, 0.031, 0.001, 0.00001, layers[:1])
    assert budget.weights(num_before) == pytest.approx([1, 2, 10])
    # three of four layers see no more than a hundred
    windowed = StepBudget.by_prices(512, 0.050, 0.031, 0.001, 0.00001, [*layers, states])
    assert windowed.weights(num_before) == pytest.approx([1, 2, 4])
    assert "behind 8,192 others counts 82.9 times" in budget.report()[0]
    alike = StepBudget.by_prices(512, 0.050, 0.031, 0.001, 0.0, layers)
    assert alike.weights(num_before).tolist() == [1, 1, 1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_async", [False, True])
def test_chunks_become_shorter_on_the_way_through_a_long_prompt(policy: str, is_async: bool) -> None:
    """A token behind 700 others costs eight times what the first one does."""
    costs = LinearCosts(per_step=0.030, per_token=0.001, per_pair=0.00001)
    core = core_with(0.050, policy=policy, is_async=is_async, costs=costs)
    core.add(1, list(range(8)), max_tokens=300)
    for _ in range(3):
        core.step()
    chunks: list[int] = []
    core.executor.observers.append(lambda decided: chunks.append(int(decided.num_tokens.max())))
    core.add(2, list(range(48)) * 15, max_tokens=1)
    gaps = lengths_of_steps(core, sequence_id_of(1, 0))
    chunks = [chunk for chunk in chunks if chunk > 1]
    # the last one is what remains
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert chunks[0] >= 15
    assert 2 <= chunks[-2] <= 3
    # beside a rounding, tokens of a chunk see each other, and answers see what is before them
    assert max(gaps) < 0.056
    core.assert_empty()


def test_what_is_found_computed_counts_for_prompts_that_start() -> None:
    costs = LinearCosts(per_step=0.030, per_token=0.001, per_pair=0.00001)
    core = core_with(0.050, costs=costs)
    core.add(1, list(range(48)) * 14, max_tokens=1)
    core.run()
    core.add(2, list(range(8)), max_tokens=60)
    for _ in range(3):
        core.step()
    for number in (3, 4):
        core.add(number, list(range(48)) * 15, max_tokens=1)
    gaps = lengths_of_steps(core, sequence_id_of(2, 0))
    assert core.cached[sequence_id_of(4, 0)] == 48 * 14
    assert max(gaps) < 0.056
    core.assert_empty()


@pytest.mark.parametrize("is_async", [False, True])
def test_no_step_takes_longer_than_its_work_says(is_async: bool) -> None:
    """By its work it is judged whether the engine stands still: four times as long is allowed. Nobody streams here, so
    that a step at the end of the prompt is as large as one at its beginning, and takes eight times as long."""
    costs = LinearCosts(per_step=0.030, per_token=0.001, per_pair=0.00001)
    core = core_with(0.0, budget=64, is_async=is_async, costs=costs)
    begun: list[tuple[float, int]] = []
    core.executor.observers.append(lambda decided: begun.append((core.clock.now(), core.scheduler.work_in_flight)))
    core.add(1, list(range(48)) * 15, max_tokens=1)
    core.run()
    times = [*(now for now, _ in begun), core.clock.now()]
    for (before, after), (_, work) in zip(pairwise(times), begun, strict=True):
        assert after - before <= 2 * work * costs.per_token
    assert begun[-2][1] > 6 * 64
    core.assert_empty()


def test_who_starts_beside_a_long_prompt_gets_what_that_leaves() -> None:
    costs = LinearCosts(per_step=0.030, per_token=0.001, per_pair=0.00001)
    core = core_with(0.050, costs=costs)
    core.add(1, list(range(8)), max_tokens=300)
    core.step()
    core.add(2, list(range(48)) * 15, max_tokens=1)
    while core.rows.num_computed.max() < 600:
        core.step()
    core.add(3, [*range(40, 0, -1)], max_tokens=1)
    # while both are there
    gaps = lengths_of_steps(core, sequence_id_of(1, 0))[:40]
    assert max(gaps) < 0.056
    core.assert_empty()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_token_dearer_than_the_target_is_computed_all_the_same(policy: str) -> None:
    costs = LinearCosts(per_step=0.030, per_token=0.001, per_pair=0.001)
    core = core_with(0.040, policy=policy, costs=costs)
    core.add(1, list(range(8)), max_tokens=400)
    core.step()
    core.add(2, list(range(48)) * 5, max_tokens=1)
    while sequence_id_of(2, 0) not in core.ends:
        core.step()
    assert sequence_id_of(1, 0) not in core.ends
    core.run()
    core.assert_empty()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_async", [False, True])
def test_who_reads_an_answer_waits_no_longer_for_its_tokens(policy: str, is_async: bool) -> None:
    core = core_with(0.050, policy=policy, is_async=is_async)
    core.add(1, list(range(8)), max_tokens=60)
    for _ in range(3):
        core.step()
    core.add(2, list(range(48)) * 8, max_tokens=3)
    core.add(3, list(range(48)) * 8, max_tokens=3)
    gaps = lengths_of_steps(core, sequence_id_of(1, 0))
    # a rounding, and one more token that nobody had counted
    assert 0.030 < max(gaps) < 0.053
    core.assert_empty()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_came_first_does_not_keep_answers_waiting(policy: str) -> None:
    core = core_with(0.050, policy=policy, budget=64)
    core.add(1, list(range(48)) * 16, max_tokens=2)
    core.step()
    core.add(2, list(range(8)), max_tokens=90)
    gaps = lengths_of_steps(core, sequence_id_of(2, 0))
    assert len(gaps) == 89
    assert max(gaps[1:40]) < 0.053


def test_beams_and_other_cohorts_wait_no_longer_between_their_steps() -> None:
    """They get nothing of a step that is decided while one of theirs is in flight."""
    for is_beam, constraints in ((True, []), (False, [OneStepAtATime(2)])):
        core = core_with(0.050, is_async=True, constraints=constraints)
        if is_beam:
            core.beam(1, list(range(8)), 2, max_tokens=60)
        else:
            core.add(1, list(range(8)), max_tokens=60)
        for _ in range(4):
            core.step()
        core.add(2, list(range(48)) * 8, max_tokens=3)
        core.step()
        times = [core.clock.now()]
        for _ in range(20):
            core.step()
            times.append(core.clock.now())
        assert max(after - before for before, after in pairwise(times)) < 0.053
        core.run()
        core.assert_empty()


@pytest.mark.parametrize("policy", ["srtf", "two_level", "bounded_srtf"])
def test_a_short_prompt_goes_before_a_long_one_also_where_answers_leave_little_room(policy: str) -> None:
    core = core_with(0.050, policy=policy, max_num_seqs=24)
    for number in range(18):
        core.add(number, list(range(8)), max_tokens=60)
    for _ in range(3):
        core.step()
    core.add(18, list(range(48)) * 8, max_tokens=2)
    core.step()
    core.add(19, [40, 41, 42, 43, 44], max_tokens=2)
    # two tokens of a step are for prompts
    for _ in range(5):
        core.step()
    assert core.tokens[sequence_id_of(19, 0)]
    assert not core.tokens[sequence_id_of(18, 0)]
    core.run()
    core.assert_empty()


def test_where_nobody_reads_a_prompt_is_computed_whole() -> None:
    core = core_with(0.050)
    core.add(1, list(range(48)) * 8, max_tokens=1)
    core.run()
    assert core.scheduler.statistics()["num_steps_total"] == 1


@pytest.mark.parametrize("target", [0.0, 1e-9, 0.040, 0.2])
def test_the_tokens_are_the_same_whatever_the_target_is(target: float) -> None:
    tokens = []
    for seconds in (0.0, target):
        core = core_with(seconds)
        for number in range(6):
            core.add(number, list(range(number, 40 + 9 * number)), max_tokens=12)
            core.step()
        core.run()
        core.assert_empty()
        tokens.append(dict(core.tokens))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("seed", range(12))
def test_random_workloads_with_a_target_break_nothing(seed: int) -> None:
    """Each checks every step of its own; prices between those that change little and those that leave one token."""
    workload = Workload(seed, has_mishaps=True, has_late_rows=True)
    scheduler = workload.core.scheduler
    seconds = (1e-9, 1.02e-3, 1.1e-3)[seed % 3]
    growth = (0.01, 0.1, 1.0, 1e4)[seed % 4]
    scheduler.budget = replace(scheduler.budget, seconds=seconds, growth=growth)
    workload.run(100)
    workload.finish()


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("2 s", 2.0), ("0.05", 0.05), ("100us", 1e-4), ("1min", 60)]
)
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "50 msec", "1h"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match="such as 50ms"):
        parse_seconds(text)
