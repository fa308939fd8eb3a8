"""Walls in the core: what goes wrong for one request ends that one, and what nobody waits for is dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from quire.engine_core.driver import CoreDriver
from quire.failpoints import arm
from quire.messages import (
    AbortRequests,
    EngineFailed,
    EngineOutputs,
    EngineRequest,
    ExtendRequest,
    SchedulerOutput,
    SequenceEnd,
    StepOutput,
    int_array,
    sequence_id_of,
)
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checking_model import expected_tokens
from quire.testing.simulator.executor import SimulatedDrafts

PROMPT = list(range(10, 21))
EXPECTED = expected_tokens(PROMPT, 20, vocab_size=50)
FIRST, SECOND, THIRD = (sequence_id_of(number, 0) for number in (1, 2, 3))


@pytest.fixture(autouse=True)
def _nothing_stays_armed() -> Iterator[None]:
    yield
    arm("")


def other_prompt(number: int) -> list[int]:
    return [(number * 13 + k) % 50 for k in range(11)]


def add_three(core: CoreUnderTest, **fields: Any) -> None:
    for number in (1, 2, 3):
        core.add(number, PROMPT if number == 1 else other_prompt(number), max_tokens=12, **fields)


def assert_only_second_failed(core: CoreUnderTest, said: str) -> None:
    assert said in str(core.ends[SECOND].error)
    assert core.tokens[FIRST] == EXPECTED[:12]
    assert core.tokens[THIRD] == expected_tokens(other_prompt(3), 12, vocab_size=50)
    assert core.core.statistics()["num_failed_requests_total"] == 1
    core.assert_empty()


# ---- while a step is decided


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("after", [0, 1])
def test_a_request_that_cannot_be_scheduled_fails_alone(is_async: bool, after: int) -> None:
    """At once, or when it needs blocks for the second part of its prompt."""
    arm(f"after_allocate:raise:when=2:after={after}:count=1")
    core = CoreUnderTest(is_async=is_async, budget=7)
    add_three(core)
    core.run()
    assert_only_second_failed(core, "could not be scheduled (InjectedFaultError)")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_budget_that_was_set_aside_for_one_that_fails_goes_to_those_who_run(is_async: bool) -> None:
    arm("after_allocate:raise:when=2:count=1")
    core = CoreUnderTest(policy="srtf", is_async=is_async, budget=8)
    core.add(1, [1] * 64, max_tokens=4)
    core.step()
    core.add(2, [2] * 8, max_tokens=4)
    core.run()
    assert {core.ends[FIRST].finish_reason, core.ends[SECOND].finish_reason} == {"length", "error"}
    core.assert_empty()


def test_one_that_cannot_be_named_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreUnderTest()
    name = core.scheduler._name_granted

    def fails_for_second(sequence: Any, **keywords: Any) -> None:
        if sequence.request.request_id == 2:
            raise MemoryError
        name(sequence, **keywords)

    monkeypatch.setattr(core.scheduler, "_name_granted", fails_for_second)
    add_three(core)
    core.run()
    assert_only_second_failed(core, "could not be scheduled (MemoryError)")


def test_siblings_of_one_that_cannot_be_named_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill a block in the same step, and have no blocks any more."""
    core = CoreUnderTest()
    monkeypatch.setattr(core.scheduler.manager.steady, "name", lambda *_: False)
    name = core.scheduler._name_granted

    def fails_for_second(sequence: Any, **keywords: Any) -> None:
        assert sequence.request.request_id in core.scheduler.lifecycle.requests
        if sequence.sequence_id == sequence_id_of(2, 1) and sequence.num_total_tokens > len(PROMPT) + 2:
            raise MemoryError
        name(sequence, **keywords)

    monkeypatch.setattr(core.scheduler, "_name_granted", fails_for_second)
    for number in (1, 2, 3):
        core.add(number, PROMPT if number == 1 else other_prompt(number), max_tokens=12, n=4 if number == 2 else 1)
    core.run()
    assert [core.ends[sequence_id_of(2, index)].finish_reason for index in range(4)] == ["error"] * 4
    assert_only_second_failed(core, "could not be scheduled (MemoryError)")


def test_all_sequences_of_a_request_fail_together() -> None:
    arm("after_allocate:oom:when=2:after=2")
    core = CoreUnderTest(is_async=True)
    core.add(1, PROMPT, max_tokens=12)
    core.add(2, other_prompt(2), max_tokens=12, n=4)
    core.beam(3, other_prompt(3), 3, max_tokens=5)
    core.run()
    assert [core.ends[sequence_id_of(2, index)].finish_reason for index in range(4)] == ["error"] * 4
    assert core.tokens[FIRST] == EXPECTED[:12]
    assert all(core.ends[sequence_id_of(3, index)].finish_reason == "length" for index in range(3))
    core.assert_empty()


def test_nobody_finds_what_a_failed_request_was_to_compute() -> None:
    """The second has the same prompt as the one that failed in the same step."""
    arm("after_allocate:raise:when=1")
    core = CoreUnderTest()
    core.add(1, PROMPT, max_tokens=3)
    core.add(2, PROMPT, max_tokens=3)
    core.run()
    assert core.ends[FIRST].finish_reason == "error"
    assert core.tokens[SECOND] == EXPECTED[:3]
    assert core.cached[SECOND] == 0


def test_a_fault_that_cannot_be_traced_ends_the_engine() -> None:
    arm("before_schedule:raise:after=3")
    core = CoreUnderTest()
    core.add(1, PROMPT, max_tokens=12)
    driver = CoreDriver(core.core)
    while driver.has_work:
        driver.step()
    last = driver.take()[-1]
    assert driver.is_dead
    assert isinstance(last, EngineFailed)
    assert "in step 4" in last.error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_ends_a_core_is_said_to_those_who_wait(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    core = CoreUnderTest()
    core.add(1, PROMPT, max_tokens=12)
    driver = CoreDriver(core.core)

    def fails() -> None:
        raise error

    monkeypatch.setattr(core.core, "step", fails)
    driver.step()
    last = driver.take()[-1]
    assert driver.is_dead
    assert isinstance(last, EngineFailed)
    assert type(error).__name__ in last.error


# ---- when results come


def test_an_end_that_goes_wrong_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreUnderTest()
    end_output = core.scheduler.lifecycle.end_output

    def fails_for_second(sequence: Any, *args: Any, **keywords: Any) -> None:
        if sequence.request.request_id == 2:
            raise KeyError("the table of ends")
        end_output(sequence, *args, **keywords)

    monkeypatch.setattr(core.scheduler.lifecycle, "end_output", fails_for_second)
    add_three(core)
    core.run()
    assert_only_second_failed(core, "could not be ended")


class Held:
    """A step in flight whose result is chosen later."""

    def __init__(self, take: Callable[[], StepOutput]) -> None:
        self.result = take


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_f21_results_out_of_order_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch, num_drafts: int) -> None:
    """Of each two steps the later one answers first."""
    core = CoreUnderTest(is_async=True, num_drafts=num_drafts, drafts=SimulatedDrafts() if num_drafts else None)
    execute = core.executor.execute
    arrived: list[StepOutput] = []

    def out_of_order(decision: SchedulerOutput) -> Any:
        arrived.append(execute(decision).result())
        return Held(lambda: arrived.pop(0 if decision.step % 2 == 0 or len(arrived) == 1 else 1))

    monkeypatch.setattr(core.core.executor, "execute", out_of_order)
    add_three(core, temperature=0.0)
    core.run()
    assert [core.tokens[one] for one in (FIRST, SECOND, THIRD)] == [
        expected_tokens(prompt, 12, vocab_size=50) for prompt in (PROMPT, other_prompt(2), other_prompt(3))
    ]
    assert core.core.statistics()["num_dropped_outputs_total"] == 0
    core.assert_empty()


@pytest.mark.parametrize("is_async", [False, True])
def test_f21_results_that_come_twice_or_late_or_of_nowhere_are_dropped(
    monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    core = CoreUnderTest(is_async=is_async)
    execute = core.executor.execute
    seen: list[StepOutput] = []

    def remember(decision: SchedulerOutput) -> Future[StepOutput]:
        future = execute(decision)
        seen.append(future.result())
        return future

    monkeypatch.setattr(core.core.executor, "execute", remember)
    add_three(core)
    num_late = 0
    while core.core.has_work:
        core.step()
        settled = seen[: len(seen) - len(core.core._in_flight)]
        for output in (
            *settled[-1:],
            *settled[:1],
            StepOutput(step=999, rows=int_array([0]), token_ids=int_array([1])),
        ):
            assert core.core.scheduler.update_from_output(output).is_empty
            core.scheduler.check_invariants()
            num_late += 1
    assert core.tokens[FIRST] == EXPECTED[:12]
    assert core.tokens[THIRD] == expected_tokens(other_prompt(3), 12, vocab_size=50)
    assert core.core.statistics()["num_dropped_outputs_total"] == num_late
    core.assert_empty()


@pytest.mark.parametrize("is_async", [False, True])
def test_two_rows_of_one_request_fail_and_the_prefixes_of_others_stay(is_async: bool) -> None:
    core = CoreUnderTest(is_async=is_async)
    core.add(1, PROMPT, max_tokens=2)
    core.run()
    core.add(2, other_prompt(2), max_tokens=12, n=2, temperature=1.0)
    core.step()
    core.step()
    rows = [one.row for one in core.scheduler.lifecycle.requests[2].sequences.values()]
    core.executor.failing_rows.update(dict.fromkeys(rows, "asked for"))
    core.run()
    assert [core.ends[sequence_id_of(2, index)].finish_reason for index in (0, 1)] == ["error", "error"]
    assert core.core.statistics()["num_failed_requests_total"] == 1
    core.add(3, PROMPT, max_tokens=1)
    core.add(4, other_prompt(2), max_tokens=1)
    core.run()
    assert core.cached[THIRD] == 8
    assert core.cached[sequence_id_of(4, 0)] == 0, "what the failed rows have cached is forgotten"
    core.assert_empty()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_f21_tokens_of_rows_that_nobody_asked_are_dropped(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, num_drafts: int
) -> None:
    """Rows that do not exist, that are free, and that belong to somebody who was not granted anything."""
    core = CoreUnderTest(is_async=is_async, num_drafts=num_drafts)
    execute = core.executor.execute
    strange = int_array([-1, 15, 16, 4711])

    def with_more(decision: SchedulerOutput) -> Future[StepOutput]:
        output = execute(decision).result()
        output.rows = int_array([*strange, *output.rows])
        output.token_ids = int_array([7] * len(strange) + output.token_ids.tolist())
        output.failures = {4711: "who is this?"}
        output.candidates = {4711: None}  # type: ignore[dict-item]
        future: Future[StepOutput] = Future()
        future.set_result(output)
        return future

    monkeypatch.setattr(core.core.executor, "execute", with_more)
    add_three(core)
    core.run()
    assert core.tokens[FIRST] == EXPECTED[:12]
    assert core.core.statistics()["num_dropped_tokens_total"] >= len(strange)
    core.assert_empty()


# ---- messages


def driver_of_three() -> tuple[CoreUnderTest, CoreDriver]:
    core = CoreUnderTest()
    add_three(core)
    return core, CoreDriver(core.core)


def run_driver(core: CoreUnderTest, driver: CoreDriver) -> list[SequenceEnd]:
    """The ends, when nothing is left to do; tokens go to the core under test."""
    while driver.has_work:
        driver.step()
    ends: list[SequenceEnd] = []
    for message in driver.take():
        if isinstance(message, EngineOutputs):
            ends += message.ends
            for sequence_id, token in zip(message.sequence_ids.tolist(), message.token_ids.tolist(), strict=True):
                core.tokens[sequence_id].append(token)
    return ends


def request(number: int, **fields: Any) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4, **fields)
    return EngineRequest(request_id=number, prompt_token_ids=PROMPT, sampling=sampling)


def test_a_request_that_cannot_be_taken_ends_with_all_its_outputs() -> None:
    arm("receive_request:raise:when=7")
    core, driver = driver_of_three()
    driver.handle(request(7, n=3))
    ends = run_driver(core, driver)
    failed = [end for end in ends if end.finish_reason == "error"]
    assert [end.sequence_id for end in failed] == [sequence_id_of(7, index) for index in range(3)]
    assert "EngineRequest" in str(failed[0].error)
    assert not driver.is_dead
    assert core.tokens[FIRST] == EXPECTED[:12]
    core.assert_empty()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("extend", ExtendRequest(request_id=2, token_ids=[1])),
        ("abort", AbortRequests(request_ids=[2])),
        ("abort", AbortRequests(sequence_ids=[SECOND])),
    ],
)
def test_a_message_that_goes_wrong_ends_the_request_that_it_is_about(
    monkeypatch: pytest.MonkeyPatch, method: str, message: Any
) -> None:
    core, driver = driver_of_three()
    for _ in range(3):
        driver.step()

    def fails(*args: Any) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(core.scheduler, method, fails)
    driver.handle(message)
    monkeypatch.undo()
    ends = {end.sequence_id: end for end in run_driver(core, driver)}
    assert "RuntimeError" in str(ends[SECOND].error)
    assert ends[FIRST].finish_reason == ends[THIRD].finish_reason == "length"
    assert core.tokens[FIRST] == EXPECTED[:12]
    core.assert_empty()


def test_an_abort_that_breaks_off_half_way_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of its output has been told when the failure comes; its blocks go back all the same, and it ends once."""
    core, driver = driver_of_three()
    driver.step()
    remove, num_calls = core.scheduler.lifecycle._remove, 0

    def fails_once(sequence: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise RuntimeError("not now")
        remove(sequence)

    monkeypatch.setattr(core.scheduler.lifecycle, "_remove", fails_once)
    driver.handle(AbortRequests(request_ids=[2]))
    ends = run_driver(core, driver)
    assert sorted(end.sequence_id for end in ends) == [FIRST, SECOND, THIRD]
    assert not driver.is_dead
    core.assert_empty()


def test_a_core_that_contradicts_itself_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message went wrong and has left something behind: answers would be in doubt."""
    core, driver = driver_of_three()
    driver.step()

    def leaks(*args: Any) -> None:
        core.pool.allocate(1)
        raise RuntimeError("half-way")

    monkeypatch.setattr(core.scheduler, "abort", leaks)
    driver.handle(AbortRequests(request_ids=[2]))
    last = driver.take()[-1]
    assert driver.is_dead
    assert isinstance(last, EngineFailed)
    assert "AbortRequests" in last.error


@pytest.mark.parametrize("is_async", [False, True])
def test_a_core_is_checked_after_a_request_has_failed_in_a_step(is_async: bool) -> None:
    """In production nobody checks each step; one in which a request failed is looked at."""
    arm("after_allocate:raise:when=2")
    core = CoreUnderTest(is_async=is_async, check_invariants=False)
    checked: list[int] = []
    core.core._checked = lambda: bool(checked.append(len(core.ends)))  # type: ignore[method-assign]
    add_three(core)
    core.run()
    assert len(checked) == 1
