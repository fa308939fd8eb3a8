"""Drafts of the simulated executor: what it proposes, verifies, cuts off and says about it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.executor_driver import Messages, admitted, forked

from quire.messages import AppendedTokens, StepOutput
from quire.sampling_params import SamplingParams
from quire.testing.simulator.checking_model import expected_tokens
from quire.testing.simulator.executor import SimulatedDrafts

PROMPT = [5, 6, 7, 8, 9, 10]
EXPECTED = expected_tokens(PROMPT, 12, vocab_size=50)
BLOCKS = {0: [3, 9, 4, 5]}
RIGHT = SimulatedDrafts(acceptance=1.0, shortfall=0.0)
WRONG = SimulatedDrafts(acceptance=0.0, shortfall=0.0)


def begin(drafts: SimulatedDrafts, count: int, **fields: Any) -> tuple[Messages, StepOutput]:
    """A prompt in one step, and so many drafts behind its first token."""
    run = Messages(drafts=drafts)
    return run, run.step({0: 6}, BLOCKS, [count], admitted=[admitted(0, PROMPT, **fields)])


def numbers(output: StepOutput) -> list[list[int]]:
    """(row, computed, total, verified, accepted) of each row."""
    return output.speculated.T.tolist()


def test_right_drafts_are_all_accepted_and_one_token_more_is_sampled() -> None:
    run, first = begin(RIGHT, 3)
    assert first.token_ids.tolist() == EXPECTED[:1]
    assert numbers(first) == [[0, 6, 10, 0, 0]]
    second = run.step({0: 4}, num_drafts=[2])
    assert second.rows.tolist() == [0] * 4
    assert second.token_ids.tolist() == EXPECTED[1:5]
    assert numbers(second) == [[0, 10, 13, 3, 3]]


def test_a_wrong_draft_is_cut_off_with_those_behind_it() -> None:
    run, _ = begin(WRONG, 3)
    second = run.step({0: 4}, num_drafts=[3])
    assert second.token_ids.tolist() == EXPECTED[1:2]
    assert numbers(second) == [[0, 7, 11, 3, 0]]
    third = run.step({0: 4})
    assert third.token_ids.tolist() == EXPECTED[2:3]
    assert numbers(third) == [[0, 8, 9, 3, 0]]


def test_drafts_are_verified_in_chunks() -> None:
    run, _ = begin(RIGHT, 4)
    second = run.step({0: 2})
    assert second.token_ids.tolist() == EXPECTED[1:3]
    assert numbers(second) == [[0, 8, 11, 2, 2]]
    third = run.step({0: 1})
    assert third.token_ids.tolist() == EXPECTED[3:4]
    assert numbers(third) == [[0, 9, 11, 1, 1]]
    fourth = run.step({0: 2}, num_drafts=[1])
    assert fourth.token_ids.tolist() == EXPECTED[4:6]
    assert numbers(fourth) == [[0, 11, 13, 1, 1]]
    assert run.executor.work.num_partial_verifications == 2


def test_a_chunk_with_a_wrong_draft_samples_at_once() -> None:
    run, _ = begin(WRONG, 4)
    second = run.step({0: 1}, num_drafts=[1])
    assert second.token_ids.tolist() == EXPECTED[1:2]
    assert numbers(second) == [[0, 7, 9, 1, 0]]


def test_a_grant_is_an_upper_bound() -> None:
    run, _ = begin(WRONG, 4)
    run.step({0: 2})  # rejected: one token is left of the four that were promised
    assert run.step({0: 3}).token_ids.tolist() == EXPECTED[2:3]
    assert run.executor.work.num_tokens == 6 + 2 + 1


def test_drafts_may_be_fewer_than_were_asked_for() -> None:
    run, first = begin(SimulatedDrafts(acceptance=1.0, shortfall=1.0), 5)
    assert numbers(first)[0][2] < 12
    lengths, tokens = [], first.token_ids.tolist()
    while len(tokens) < 9:
        output = run.step({0: 6}, num_drafts=[5])
        assert numbers(output), "whoever was asked is told of, also with none"
        tokens += output.token_ids.tolist()
        lengths.append(len(output.token_ids))
    assert tokens[:9] == EXPECTED[:9]
    assert 1 in lengths, "none at all, now and then"


@pytest.mark.parametrize("seed", range(30))
def test_sampled_tokens_do_not_depend_on_drafts(seed: int) -> None:
    run = Messages(drafts=SimulatedDrafts(acceptance=0.7, shortfall=0.3, has_cache=seed % 2 == 1))
    sampling = SamplingParams(temperature=1.0)
    message = admitted(0, PROMPT, sampling=sampling)
    message.seed = seed
    expected = expected_tokens(PROMPT, 24, vocab_size=50, seed=seed, is_greedy=False)
    tokens = run.step({0: 6}, {0: list(range(12))}, [4], admitted=[message]).token_ids.tolist()
    while len(tokens) < 24:
        tokens += run.step({0: 1 + len(tokens) % 5}, num_drafts=[len(tokens) % 4]).token_ids.tolist()
    assert tokens[:24] == expected


def test_rows_with_and_without_drafts_side_by_side() -> None:
    run = Messages(drafts=RIGHT)
    run.step({0: 6, 1: 6}, {0: [3, 9, 4], 1: [1, 2, 6]}, [2, 0], admitted=[admitted(0, PROMPT), admitted(1, PROMPT)])
    output = run.step({0: 3, 1: 1}, num_drafts=[0, 3])
    assert output.rows.tolist() == [0, 0, 0, 1]
    assert output.token_ids.tolist() == [*EXPECTED[1:4], EXPECTED[1]]
    assert numbers(output) == [[0, 9, 10, 2, 2], [1, 7, 11, 0, 0]]


def test_candidates_come_as_ever() -> None:
    run = Messages(drafts=RIGHT)
    output = run.step(
        {0: 6, 1: 6},
        {0: [3, 9, 4], 1: [1, 2, 6]},
        [2, 0],
        admitted=[admitted(0, PROMPT), admitted(1, PROMPT, num_candidates=4)],
    )
    assert output.rows.tolist() == [0]
    assert len(output.candidates[1].token_ids) == 4
    assert numbers(output) == [[0, 6, 9, 0, 0]]


def test_a_row_that_fails_proposes_and_verifies_nothing() -> None:
    run, _ = begin(RIGHT, 2)
    run.executor.failing_rows[0] = "asked for"
    output = run.step({0: 3}, num_drafts=[2])
    assert (output.failures, numbers(output), len(output.rows)) == ({0: "asked for"}, [], 0)
    assert len(run.step({0: 3}, num_drafts=[2]).rows) == 0, "the core had not heard of it yet"


def test_open_input_has_no_drafts() -> None:
    run = Messages(drafts=RIGHT)
    assert len(run.step({0: 3}, BLOCKS, [3], admitted=[admitted(0, PROMPT[:3], is_final=False)]).rows) == 0
    rest = AppendedTokens(row=0, token_ids=PROMPT[3:], is_final=True)
    output = run.step({0: 3}, num_drafts=[1], appended=[rest])
    assert output.token_ids.tolist() == EXPECTED[:1]
    assert numbers(output) == [[0, 6, 8, 0, 0]]


def test_the_cells_of_drafts_are_checked() -> None:
    run, _ = begin(RIGHT, 3)
    run.step({0: 2})
    run.executor.cache.spoil(9, 3)  # the first draft, accepted
    with pytest.raises(AssertionError, match=r"wrong content at positions \[7\]"):
        run.step({0: 2})


def test_a_draft_model_needs_slots_behind_the_granted_tokens() -> None:
    for with_slots in (True, False):
        run = Messages(drafts=SimulatedDrafts(acceptance=1.0, shortfall=0.0, has_cache=True))
        tables = {0: [3, 9, 4] if with_slots else [3, 9]}
        if with_slots:
            run.step({0: 6}, tables, [4], admitted=[admitted(0, PROMPT)])
        else:
            with pytest.raises(AssertionError, match="a draft has no block"):
                run.step({0: 6}, tables, [4], admitted=[admitted(0, PROMPT)])


def test_the_cache_of_a_draft_model_is_copied_and_checked_like_the_other() -> None:
    run = Messages(drafts=SimulatedDrafts(has_cache=True))
    run.step({0: 6}, BLOCKS, admitted=[admitted(0, PROMPT)])
    child = forked(0, 1, 7, 6)
    run.step({0: 1, 1: 1}, {1: [3, 8]}, [1, 1], forked=[child], block_copies=[(9, 8)])
    run.executor._caches[1].spoil(8, 0)
    with pytest.raises(AssertionError, match=r"row 1.*positions \[4\]"):
        run.step({1: 1})


def test_drafts_of_others_may_not_be_forked() -> None:
    run, _ = begin(RIGHT, 3)
    with pytest.raises(AssertionError, match="more tokens than its parent"):
        run.step({0: 1}, forked=[forked(0, 1, 9, 6)])
