"""What random workloads have found, as short calls: each of these once broke a rule.

The pools are as small as the mistake allows. CheckedCore holds every answer against what it must be.
"""

from __future__ import annotations

import pytest

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.scheduler.constraints import LongPrefill
from quire.engine_core.scheduler.step_budget import StepBudget
from quire.errors import UserError
from quire.messages import DecodingSpec, EngineRequest, int_array, sequence_id_of
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest
from quire.testing.simulator.checked_core import CheckedCore
from quire.testing.simulator.executor import SimulatedDrafts


def request(number: int, prompt: list[int], max_tokens: int, **fields: object) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_kept_sequence_that_cannot_be_used_does_not_stand_in_the_way(prefix_caching: bool) -> None:
    checked = CheckedCore(CoreUnderTest(num_blocks=12, block_size=1, max_model_len=12, prefix_caching=prefix_caching))
    checked.add(request(1, list(range(5)), 2, keep="c"))
    for _ in range(3):
        checked.step()
    checked.add(request(2, list(range(4)), 1, continues="c", cache_salt="another tenant"))
    checked.drain()


def test_a_pin_that_is_refused_changes_nothing() -> None:
    core = CoreUnderTest(num_blocks=64, block_size=1, groups=[KVGroup(("a",)), KVGroup(("b",), 9)])
    core.add(1, list(range(20)), max_tokens=2, request={"keep": "c"})
    core.run()
    before = core.core.control("list_kept", {})
    with pytest.raises(UserError, match="sliding window"):
        core.core.control("pin_kept", {"handle": "c", "num_tokens": 3})
    assert core.core.control("list_kept", {}) == before


def test_blocks_that_a_kept_sequence_gives_up_are_counted_where_they_are_used() -> None:
    checked = CheckedCore(CoreUnderTest(num_blocks=15, block_size=1, max_model_len=12))
    checked.add(request(1, list(range(6)), 1, keep="c"))
    checked.step()
    checked.step()
    checked.add(request(2, list(range(20, 27)), 4))
    checked.step()
    checked.add(request(3, [*range(6), 40, 41, 42], 1))
    checked.drain()


def test_a_copy_reads_its_source_before_that_is_handed_out_again() -> None:
    checked = CheckedCore(CoreUnderTest(num_blocks=8, block_size=4, max_model_len=24))
    for number, handle in ((1, "c"), (2, "d")):
        checked.add(request(number, list(range(20 * number, 20 * number + 5)), 2, keep=handle))
        for _ in range(3):
            checked.step()
    checked.add(request(3, [30], 1, continues="c"))
    checked.add(request(5, [40] * 11, 1))
    checked.add(request(4, [31], 1, continues="d"))
    checked.drain()


def test_what_is_kept_of_a_request_that_gave_way_has_no_blocks() -> None:
    core = CoreUnderTest(num_blocks=6, block_size=4, max_model_len=24, num_host_blocks=6, preemption_mode="swap")
    core.add(1, list(range(10)), max_tokens=12)
    core.add(2, list(range(20, 28)), max_tokens=12, request={"keep": "c"})
    while not core.scheduler.queues.num_preempted:
        core.step()
    core.scheduler.abort([], [sequence_id_of(2, 0)])
    (kept,) = core.core.control("list_kept", {})
    assert kept["num_computed_tokens"] == kept["num_blocks"] == 0
    assert kept["num_tokens"] >= 8


def test_beams_that_answered_before_they_gave_way_are_asked_again() -> None:
    """Two of three beams have answered, all give way, and all answer in one step later."""
    checked = CheckedCore(CoreUnderTest(num_blocks=64, block_size=4, budget=2, max_num_seqs=4))
    args = {"width": 3, "early_stopping": "never"}
    sampling = SamplingParams(n=3, temperature=0.0, max_tokens=6)
    checked.add(
        EngineRequest(
            request_id=1,
            prompt_token_ids=[6, 13, 43],
            sampling=sampling,
            decoding=DecodingSpec(method="beam_search", args=args),
        )
    )
    scheduler = checked.core.scheduler
    for _ in range(5):
        while not has_answered_in_part(checked.core):
            checked.step()
        # one budget for all of them, once they are back
        scheduler._preempt(scheduler.lifecycle.requests[1], "asked for")
        scheduler.budget = StepBudget(64)
        checked.step()
        scheduler.budget = StepBudget(2)
        checked.step()
        if not checked.plans:
            break
    checked.drain()
    assert checked.core.scheduler.recovery.num_by_recompute > 0


def has_answered_in_part(core: CoreUnderTest) -> bool:
    sequences = core.scheduler.running.living_sequences()
    return len({sequence.num_computed_tokens == sequence.num_total_tokens for sequence in sequences}) == 2


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_blocks_that_a_window_has_passed_are_not_brought_back(mode: str) -> None:
    """A block that came back and was passed in the same step was handed out twice in it."""
    groups = [KVGroup(("a",), 9), KVGroup(("b",)), KVGroup(("c",), 9)]
    num_preemptions = 0.0
    for num_blocks in range(27, 37):
        options = {"num_blocks": num_blocks, "num_host_blocks": num_blocks, "preemption_mode": mode}
        checked = CheckedCore(CoreUnderTest(block_size=4, groups=groups, max_model_len=36, **options))
        for number in range(4):
            checked.add(request(number, list(range(number * 7, number * 7 + 11)), 20))
        checked.drain()
        num_preemptions += checked.core.core.statistics()[f"num_preemptions_by_{mode}_total"]
    assert num_preemptions > 10


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_a_group_that_gave_way_before_it_forked_gets_blocks_for_its_forks(num_drafts: int) -> None:
    """Else it would take them from somebody who has just come back (I18). Each fork has room for its own drafts."""
    drafts = SimulatedDrafts(acceptance=0.0, has_cache=True)
    for num_blocks in range(9, 24):
        limit = [LongPrefill(8)]
        core = CoreUnderTest(
            num_blocks=num_blocks, max_model_len=36, num_drafts=num_drafts, drafts=drafts, constraints=limit
        )
        checked = CheckedCore(core)
        checked.add(request(1, list(range(24)), 9))
        sampling = SamplingParams(n=3, temperature=1.0, max_tokens=6)
        checked.add(EngineRequest(request_id=2, prompt_token_ids=list(range(30, 41)), sampling=sampling, priority=1))
        checked.step()
        for one in list(core.scheduler.running.requests):
            assert len(one.sequences) == 1
            core.scheduler._preempt(one, "asked for")
        checked.drain()
        assert core.scheduler.recovery.num_broken_protections == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_row_of_which_the_worker_has_not_heard_is_not_released(is_async: bool) -> None:
    """A group that had lost its rows comes back, the budget reaches only its first sequence, and it is given up."""
    core = CoreUnderTest(max_num_seqs=2, budget=8, policy="priority", prefix_caching=False, is_async=is_async)
    checked = CheckedCore(core)
    sampling = SamplingParams(n=2, temperature=1.0, max_tokens=12)
    checked.add(EngineRequest(request_id=1, prompt_token_ids=list(range(6)), sampling=sampling, priority=5))
    for _ in range(8):
        checked.step()
    checked.add(request(2, [30, 31, 32], 2, priority=1))
    group = core.scheduler.lifecycle.requests[1]
    was_displaced = False
    for _ in range(20):
        checked.step()
        was_displaced |= not group.holds_rows
        if was_displaced and any(one.row >= 0 and not one.is_admitted for one in group.sequences.values()):
            break
    else:
        pytest.fail("it never came to that")
    checked.abort(1)
    checked.add(request(3, [40, 41], 2))  # the worker hears of ends with the next step
    checked.drain()


def test_siblings_are_named_as_far_as_they_have_blocks() -> None:
    """Three sequences come back with a budget of 3: the later ones look for what the earlier ones are computing."""
    core = CoreUnderTest(max_num_seqs=4, budget=3, block_size=2, groups=[KVGroup(("a",), 5)], num_blocks=40)
    checked = CheckedCore(core)
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=12)
    checked.add(EngineRequest(request_id=1, prompt_token_ids=list(range(4)), sampling=sampling))
    for _ in range(3):
        for _ in range(6):
            checked.step()
        if 1 in core.scheduler.lifecycle.requests:
            core.scheduler._preempt(core.scheduler.lifecycle.requests[1], "asked for")
    checked.drain()
    assert core.scheduler.recovery.num_by_recompute > 0


@pytest.mark.parametrize("policy", ["fifo", "srtf", "two_level"])
def test_chunks_with_a_limit_do_not_make_siblings_compute_the_same(policy: str) -> None:
    """Each began a step after its sibling, found one chunk, and went on beside it. The pool has no room for that."""
    core = CoreUnderTest(
        num_blocks=18, block_size=2, max_model_len=28, constraints=[LongPrefill(2)], policy=policy, prefix_caching=False
    )
    checked = CheckedCore(core)
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=4, ignore_eos=True)
    checked.add(EngineRequest(request_id=1, prompt_token_ids=list(range(20)), sampling=sampling))
    while not checked.plans[1].has_output:
        checked.step()
    checked.step()
    core.scheduler._preempt(core.scheduler.lifecycle.requests[1], "asked for")
    before = core.executor.work.num_tokens
    checked.drain()
    assert core.scheduler.recovery.num_by_recompute == 1
    # the prompt once, and of each what it had sampled and what was still to come
    assert core.executor.work.num_tokens - before <= 20 + 3 * 4


@pytest.mark.parametrize("first_token", range(5))
def test_an_answer_of_a_beam_that_has_grown_meanwhile_is_none(first_token: int) -> None:
    """Both gave way with an answer on the way, and are computed again: the second beam answers once more, too late."""
    core = CoreUnderTest(budget=1, policy="two_level", policy_options={"progress_share": 0.5}, is_async=True)
    checked = CheckedCore(core)
    decoding = DecodingSpec(method="beam_search", args={"width": 2, "early_stopping": "never"})
    sampling = SamplingParams(n=2, temperature=0.0, max_tokens=8, ignore_eos=True)
    checked.add(EngineRequest(request_id=1, prompt_token_ids=[first_token], sampling=sampling, decoding=decoding))
    beams = core.scheduler.lifecycle.requests[1]
    for _ in range(4):
        while len(beams.sequences) < 2 or has_answered_in_part(core) or not core.scheduler._results.in_flight:
            checked.step()
        core.scheduler._preempt(beams, "asked for")
        for _ in range(6):
            checked.step()
    checked.drain()


def test_who_comes_back_copies_nothing_that_is_written_only_in_the_same_step() -> None:
    """Of two outputs one has yet to compute the last token of the prompt, in a block that both share. It lies in swap
    space, and somebody else begins with the same prompt in the step in which they come back."""
    core = CoreUnderTest(num_blocks=20, num_host_blocks=20, preemption_mode="swap", check_invariants=False)
    prompt = list(range(12))
    core.add(1, prompt, n=2, max_tokens=4)
    core.step()
    forked = core.scheduler.lifecycle.requests[1]
    assert [one.num_computed_tokens for one in forked.sequences.values()] == [12, 11]
    core.scheduler.admission_control.preempt(forked, "somebody needed its blocks")
    core.core.control("reset_prefix_cache", {})
    # others than those that it had, and that still hold what it needs
    others = core.pool.allocate(3)
    core.add(2, [*prompt, 5], max_tokens=2, request={"priority": -1})
    core.step()
    core.pool.release(int_array(others))
    core.run()
    assert core.executor.work.num_swapped_in_blocks == 3
    assert core.tokens[sequence_id_of(1, 0)] == core.tokens[sequence_id_of(1, 1)]


def test_what_a_later_output_copies_is_counted_also_behind_a_window() -> None:
    """The session that a request continues has changed since: its second output, which has a token less, still finds
    the beginning there, and copies the block that is partly filled."""
    core = CoreUnderTest(
        num_blocks=2, block_size=16, groups=[KVGroup(("a",), 5)], prefix_caching=False, max_model_len=20
    )
    prompt = list(range(1, 11))
    core.add(1, prompt, max_tokens=1, request={"keep": "s"})
    core.run()
    said = core.tokens[sequence_id_of(1, 0)]
    core.add(2, [40], n=2, max_tokens=3, request={"continues": "s"})
    core.step()
    core.scheduler.admission_control.preempt(core.scheduler.lifecycle.requests[2], "somebody needed its blocks")
    core.add(3, [*prompt, *said, 41], max_tokens=1, request={"keep": "s", "priority": -1})
    core.run()
    assert {core.ends[sequence_id_of(2, index)].finish_reason for index in range(2)} == {"length"}
