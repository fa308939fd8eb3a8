"""Asynchronous scheduling in the core (4.6.1): what was decided before it was known what had become of the last step.

`core.step()` decides step N + 1 and settles step N, so what a step brings is seen one call later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.metamorphic import SETTINGS, outputs_of, random_case

from quire.engine_core.request import Sequence, Status
from quire.messages import AbortRequests, DecodingSpec, EngineRequest, SchedulerOutput, sequence_id_of
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checked_core import CheckedCore
from quire.testing.simulator.checking_model import expected_tokens
from quire.testing.simulator.engine_settings import EngineSettings
from quire.testing.simulator.executor import SimulatedDrafts

PROMPT = list(range(10, 21))
EXPECTED = expected_tokens(PROMPT, 20, vocab_size=50)
FIRST = sequence_id_of(1, 0)


def rows_of_steps(core: CoreUnderTest) -> Iterator[set[int]]:
    """The requests that each step computes, as it is decided."""
    seen: list[set[int]] = []

    def watch(output: SchedulerOutput) -> None:
        running = core.scheduler.running
        seen.append({running.sequence_at(row).request.request_id for row in output.rows.tolist()})

    core.executor.observers.append(watch)
    while True:
        before = len(seen)
        core.step()
        yield seen[-1] if len(seen) > before else set()


def dropped(core: CoreUnderTest) -> float:
    return core.scheduler.statistics()["num_dropped_tokens_total"]


# ---- ends


def test_what_a_step_brings_is_seen_one_call_later() -> None:
    core = CoreUnderTest(is_async=True)
    core.add(1, PROMPT, max_tokens=3)
    seen = [core.step().token_ids.tolist() for _ in range(4)]
    assert seen == [[], EXPECTED[:1], EXPECTED[1:2], EXPECTED[2:3]]
    assert core.ends[FIRST].finish_reason == "length"
    assert core.executor.work.num_steps == 3, "the greatest length is known beforehand"


def test_who_watches_the_steps_hears_of_all_that_are_under_way() -> None:
    """A small step is decided while a large one runs: whoever waits for both waits for the large one."""
    core = CoreUnderTest(is_async=True)
    works: list[int] = []
    core.core.watch_steps(lambda decision, work: works.append(work))
    core.add(1, PROMPT, max_tokens=4)
    core.run()
    assert works == [len(PROMPT), len(PROMPT) + 1, 2, 2]


def test_one_token_past_a_stop_is_computed_and_never_seen() -> None:
    core = CoreUnderTest(is_async=True)
    core.add(1, PROMPT, max_tokens=12, stop_token_ids=[EXPECTED[4]])
    core.run()
    assert core.tokens[FIRST] == EXPECTED[:5]
    assert (core.ends[FIRST].finish_reason, core.ends[FIRST].stop_reason) == ("stop", EXPECTED[4])
    assert core.executor.work.num_steps == 6, "one more than tokens"
    assert dropped(core) == 1
    core.assert_empty()


def test_drafts_accepted_behind_a_stop_are_never_seen() -> None:
    core = CoreUnderTest(is_async=True, num_drafts=4, drafts=SimulatedDrafts(acceptance=1.0, shortfall=0.0))
    core.add(1, PROMPT, max_tokens=20, stop_token_ids=[EXPECTED[3]])
    core.run()
    assert core.tokens[FIRST] == EXPECTED[:4]
    # tokens 2 to 6 come from one step; the step behind it brings five more
    assert dropped(core) == 2 + 5
    core.assert_empty()


def test_an_abort_between_a_step_and_its_results() -> None:
    core = CoreUnderTest(is_async=True)
    core.add(1, PROMPT, max_tokens=12)
    for _ in range(3):
        core.step()
    core.core.abort(AbortRequests(request_ids=[1]))
    outputs = core.step()
    assert [(end.sequence_id, end.finish_reason) for end in outputs.ends] == [(FIRST, "abort")]
    assert not len(outputs.token_ids), "the results of the step in flight are dropped"
    assert core.tokens[FIRST] == EXPECTED[:2]
    assert not core.core.has_work or core.step().is_empty
    core.assert_empty()


def test_a_row_is_given_to_somebody_else_while_its_old_step_is_in_flight() -> None:
    core = CoreUnderTest(is_async=True, max_num_seqs=1)
    core.add(1, PROMPT, max_tokens=12)
    other = list(range(30, 35))
    core.step()
    core.step()
    core.core.abort(AbortRequests(request_ids=[1]))
    core.add(2, other, max_tokens=4)
    outputs = core.step()  # decides the first step of request 2 in row 0, and settles the second of request 1 there
    assert not len(outputs.token_ids)
    assert outputs.starts[0].sequence_id == sequence_id_of(2, 0)
    core.run()
    assert core.tokens[sequence_id_of(2, 0)] == expected_tokens(other, 4, vocab_size=50)
    assert core.tokens[FIRST] == EXPECTED[:1]


def test_the_row_of_one_that_met_its_stop_token_goes_to_the_next_at_once() -> None:
    core = CoreUnderTest(is_async=True, max_num_seqs=1)
    other = list(range(30, 35))
    core.add(1, PROMPT, max_tokens=12, stop_token_ids=[EXPECTED[1]])
    core.add(2, other, max_tokens=4)
    core.run()
    assert core.tokens[FIRST] == EXPECTED[:2]
    assert core.tokens[sequence_id_of(2, 0)] == expected_tokens(other, 4, vocab_size=50)
    # 2 tokens and one too many, then 4
    assert core.executor.work.num_steps == 7


def test_an_id_may_be_used_again_while_its_old_step_is_in_flight() -> None:
    core = CoreUnderTest(is_async=True)
    core.add(1, PROMPT, max_tokens=12)
    for _ in range(3):
        core.step()
    core.core.abort(AbortRequests(request_ids=[1]))
    other = list(range(30, 35))
    core.add(1, other, max_tokens=3)
    before = len(core.tokens[FIRST])
    core.step()
    del core.ends[FIRST]  # of the first one
    core.run()
    assert core.tokens[FIRST][before:] == expected_tokens(other, 3, vocab_size=50)


# ---- who waits for the core


def test_several_outputs_wait_once_for_their_forks_and_others_do_not() -> None:
    core = CoreUnderTest(is_async=True)
    core.add(1, PROMPT, max_tokens=9)
    core.add(2, PROMPT[:5], max_tokens=5, n=3, temperature=1.0)
    steps = rows_of_steps(core)
    assert [next(steps) for _ in range(5)] == [{1, 2}, {1}, {1, 2}, {1, 2}, {1, 2}]
    core.run()
    for index in range(3):
        assert len(core.tokens[sequence_id_of(2, index)]) == 5
    assert core.tokens[FIRST] == EXPECTED[:9]


def test_beams_wait_in_every_step_and_others_do_not() -> None:
    core = CoreUnderTest(is_async=True)
    core.add(1, PROMPT, max_tokens=9)
    core.beam(2, PROMPT[:5], width=3, max_tokens=4)
    steps = rows_of_steps(core)
    assert [next(steps) for _ in range(6)] == [{1, 2}, {1}, {1, 2}, {1}, {1, 2}, {1}]
    core.run()
    assert core.tokens[FIRST] == EXPECTED[:9]


def test_beams_alone_run_as_if_synchronous() -> None:
    found = []
    for is_async in (False, True):
        core = CoreUnderTest(is_async=is_async)
        core.beam(2, PROMPT[:5], width=3, max_tokens=6)
        core.run()
        found.append((dict(core.tokens), core.executor.work.num_steps))
    assert found[0] == found[1]


def test_streamed_input_waits_for_its_end_and_no_longer() -> None:
    core = CoreUnderTest(is_async=True)
    checked = CheckedCore(core)
    request = EngineRequest(
        request_id=1,
        prompt_token_ids=PROMPT[:4],
        sampling=SamplingParams(temperature=0.0, max_tokens=6),
        is_final=False,
    )
    checked.add(request, PROMPT[4:])
    checked.step()
    checked.extend(1, 3)
    checked.step()
    checked.extend(1)
    for _ in range(8):
        checked.step()
    assert not checked.plans
    checked.drain()


# ---- giving way with a token in flight


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_who_gives_way_with_a_token_in_flight_goes_on_behind_it(mode: str, num_drafts: int) -> None:
    core = CoreUnderTest(
        num_blocks=12,
        block_size=4,
        is_async=True,
        preemption_mode=mode,
        num_host_blocks=12,
        prefix_caching=False,
        num_drafts=num_drafts,
    )
    checked = CheckedCore(core)
    for number in range(3):
        sampling = SamplingParams(temperature=0.0, max_tokens=20)
        checked.add(EngineRequest(request_id=number, prompt_token_ids=[number] * 6, sampling=sampling))
    checked.drain()
    statistics = core.scheduler.statistics()
    assert statistics[f"num_preemptions_by_{mode}_total"] > 0
    assert checked.decisions.counts["preempted in flight"] > 0
    if not num_drafts:
        assert dropped(core) == 0, "a token that was sampled is not sampled again"


def test_who_loses_its_row_with_a_token_in_flight_samples_it_again() -> None:
    core = CoreUnderTest(is_async=True, max_num_seqs=1, policy="priority")
    core.add(1, PROMPT, max_tokens=8, request={"priority": 5})
    for _ in range(3):
        core.step()
    other = list(range(30, 35))
    core.add(2, other, max_tokens=3, request={"priority": 1})
    core.step()
    victim = core.scheduler.lifecycle.requests[1]
    assert victim.status is Status.PREEMPTED
    assert not victim.holds_rows
    assert dropped(core) == 1
    core.run()
    assert next(iter(core.ends)) == sequence_id_of(2, 0), "the more important one goes first"
    assert core.tokens[FIRST] == EXPECTED[:8]
    assert core.tokens[sequence_id_of(2, 0)] == expected_tokens(other, 3, vocab_size=50)


# ---- failures


def test_a_failure_of_a_row_that_has_ended_already_says_nothing() -> None:
    """The stop token is settled when the step behind it has been decided, and it is this one that fails."""
    core = CoreUnderTest(is_async=True)
    core.add(1, PROMPT, max_tokens=12, stop_token_ids=[EXPECTED[1]])
    core.step()
    core.step()
    core.executor.failing_rows[0] = "asked for"
    core.step()
    assert core.executor.failing_rows == {}, "the third step was to compute it"
    core.run()
    assert [end.finish_reason for end in core.ends.values()] == ["stop"]
    assert core.tokens[FIRST] == EXPECTED[:2]
    core.add(2, [*PROMPT, 1, 2, 3], max_tokens=2)
    core.run()
    assert core.cached[sequence_id_of(2, 0)] == 0, "what a failed row has written is not found"


def test_a_failure_ends_a_request_although_its_next_step_is_in_flight() -> None:
    core = CoreUnderTest(is_async=True)
    core.add(1, PROMPT, max_tokens=12)
    core.add(2, PROMPT[:4], max_tokens=6)
    core.step()
    core.executor.failing_rows[0] = "asked for"
    core.run()
    assert core.ends[FIRST].finish_reason == "error"
    assert core.tokens[FIRST] == EXPECTED[:1]
    assert len(core.tokens[sequence_id_of(2, 0)]) == 6
    core.assert_empty()


def test_a_row_that_failed_may_be_taken_while_its_next_step_is_in_flight() -> None:
    core = CoreUnderTest(is_async=True, max_num_seqs=1)
    core.add(1, PROMPT, max_tokens=12)
    core.add(2, PROMPT[:4], max_tokens=6)
    core.step()
    core.executor.failing_rows[0] = "asked for"
    core.run()
    assert core.ends[FIRST].finish_reason == "error"
    assert core.tokens[sequence_id_of(2, 0)] == expected_tokens(PROMPT[:4], 6, vocab_size=50)


# ---- time


def test_a_step_begins_when_the_one_before_it_is_done() -> None:
    """Results are seen when their step is done, not when the next one is."""
    times = []
    for is_async in (False, True):
        core = CoreUnderTest(is_async=is_async)
        core.add(1, PROMPT, max_tokens=5)
        core.step()
        times.append(core.clock.now())
        core.run()
        times.append(core.clock.now())
    assert times[0] > times[2] == 0
    assert times[1] == pytest.approx(times[3])


# ---- a step that was not decided after all


def test_a_fork_gets_no_table_entries_of_who_failed_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt that is to fork is computed, the only other request fails behind its allocation: there is no step
    that would take its table entries along."""
    core = CoreUnderTest(is_async=True)
    allocate_slots = core.manager.allocate_slots

    def fails_for_second(sequence: Sequence, *args: Any) -> bool:
        is_done = allocate_slots(sequence, *args)
        if sequence.request.request_id == 2:
            raise MemoryError
        return is_done

    monkeypatch.setattr(core.manager, "allocate_slots", fails_for_second)
    core.add(1, PROMPT, n=2, max_tokens=5)
    core.step()
    core.add(2, [30] * 14, max_tokens=3)
    core.run()
    assert core.ends[sequence_id_of(2, 0)].finish_reason == "error"
    assert [core.tokens[sequence_id_of(1, index)] for index in range(2)] == [EXPECTED[:5]] * 2
    core.assert_empty()


# ---- the same tokens


@pytest.mark.parametrize("part", range(4))
def test_the_tokens_are_those_of_synchronous_scheduling(part: int) -> None:
    for seed in range(500 + part, 550, 4):
        case, setting = random_case(seed), SETTINGS[seed * 35 % len(SETTINGS)]
        found = [outputs_of(case, setting, EngineSettings(is_async=is_async))[0] for is_async in (False, True)]
        assert found[0] == found[1], f"case {seed}: {setting}"


def test_kept_output_does_not_hold_what_was_never_seen() -> None:
    core = CoreUnderTest(is_async=True, block_size=4)
    core.add(1, PROMPT, max_tokens=12, stop_token_ids=[EXPECTED[4]], request={"keep": "a"})
    core.run()
    (kept,) = core.core.control("list_kept", {})
    assert kept["num_tokens"] == len(PROMPT) + 5
    core.add(2, [7, 8], max_tokens=4, request={"continues": "a"})
    core.run()
    expected = expected_tokens([*PROMPT, *EXPECTED[:5], 7, 8], 4, vocab_size=50)
    assert core.tokens[sequence_id_of(2, 0)] == expected


def test_diverse_beams_and_samples_side_by_side() -> None:
    checked = CheckedCore(CoreUnderTest(is_async=True, num_drafts=2, num_blocks=40, block_size=4, max_model_len=40))
    args = {"width": 4, "num_groups": 2, "diversity_penalty": 0.5}
    beams = DecodingSpec(method="diverse_beam_search", args=args)
    sampling = SamplingParams(n=4, temperature=1.0, max_tokens=7)
    checked.add(EngineRequest(request_id=1, prompt_token_ids=PROMPT, sampling=sampling, decoding=beams))
    checked.add(EngineRequest(request_id=2, prompt_token_ids=PROMPT, sampling=sampling, seed=3))
    checked.drain()
    assert checked.core.executor.work.num_accepted_tokens > 0
