"""The row table follows the differences of a SchedulerOutput, and nothing else."""

import numpy as np
import pytest

from quire.messages import AdmittedSequence, AppendedTokens, ForkedSequence, int_array
from quire.sampling_params import SamplingParams
from quire.worker.row_table import RowTable


def admitted(row, tokens, **fields):
    values = {
        "num_prompt_tokens": len(tokens),
        "num_computed_tokens": 0,
        "sampling": SamplingParams(),
        "seed": 0,
        **fields,
    }
    return AdmittedSequence(row=row, sequence_id=row, token_ids=int_array(tokens), **values)


def numbers(table, row):
    return int(table.num_computed[row]), int(table.num_total[row]), int(table.num_prompt[row])


def with_drafts(table, *drafts, row=0):
    """Row 0 if it was admitted with three tokens: two of them computed, and drafts behind them."""
    table.num_computed[row] = table.num_total[row] - 1
    table.add_drafts(int_array([row]), int_array([drafts or (6, 7)]))


@pytest.fixture
def table():
    table = RowTable(num_rows=4, max_model_len=8)
    table.open_groups(2, blocks_per_row=4, num_blocks=10)
    return table


def test_a_sequence_takes_a_row_with_its_progress(table):
    table.admit(admitted(2, [5, 6, 7, 8], num_prompt_tokens=3, num_computed_tokens=2))

    assert table.token_ids[2, :4].tolist() == [5, 6, 7, 8]
    assert numbers(table, 2) == (2, 4, 3)
    assert table.is_used.tolist() == [False, False, True, False]
    table.check_invariants()


def test_a_child_has_the_first_tokens_of_its_parent(table):
    table.admit(admitted(0, [5, 6, 7, 8], num_prompt_tokens=2))
    table.fork(ForkedSequence(parent_row=0, row=3, sequence_id=9, num_total_tokens=3, num_computed_tokens=2, seed=1))
    table.append(int_array([3]), int_array([3]), int_array([99]))

    assert table.token_ids[3, :4].tolist() == [5, 6, 7, 99]
    assert numbers(table, 3) == (2, 4, 2)
    assert table.token_ids[0, :4].tolist() == [5, 6, 7, 8]


def test_a_child_has_the_block_tables_of_its_parent_in_every_group(table):
    table.admit(admitted(0, [5, 6, 7, 8]))
    table.write_blocks(np.array([(0, 0, 0, 7), (0, 0, 1, 3), (1, 0, 0, 9), (1, 0, 3, 2)]).T)
    table.write_blocks(np.array([(0, 3, 2, 6), (1, 3, 1, 8)]).T)
    fork = ForkedSequence(parent_row=0, row=3, sequence_id=9, num_total_tokens=4, num_computed_tokens=4, seed=1)
    table.fork(fork)
    table.extend(AppendedTokens(row=3, token_ids=[77]))
    table.write_blocks(np.array([(0, 3, 1, 5)]).T)

    assert table.block_tables[0, 3].tolist() == [7, 5, 0, 0]
    assert table.block_tables[1, 3].tolist() == [9, 0, 0, 2]
    assert table.block_tables[0, 0].tolist() == [7, 3, 0, 0]
    assert table.token_ids[3, :5].tolist() == [5, 6, 7, 8, 77]
    assert numbers(table, 3) == (4, 5, 4)
    table.check_invariants()


def test_a_fork_takes_a_row_that_nobody_released(table):
    """Longer, streamed and further on than the child: nothing of it is left."""
    table.admit(admitted(0, [5, 6, 7], num_prompt_tokens=2))
    table.admit(admitted(1, [1] * 8, num_computed_tokens=7, is_final=False))
    table.write_blocks(np.array([(group, 1, index, 4) for group in (0, 1) for index in range(4)]).T)
    forks = [
        ForkedSequence(parent_row=0, row=1, sequence_id=8, num_total_tokens=3, num_computed_tokens=3, seed=1),
        # in list order: the child is a parent at once
        ForkedSequence(parent_row=1, row=2, sequence_id=9, num_total_tokens=2, num_computed_tokens=1, seed=1),
    ]
    for fork in forks:
        table.fork(fork)

    assert (numbers(table, 1), numbers(table, 2)) == ((3, 3, 2), (1, 2, 2))
    assert table.token_ids[1, :3].tolist() == [5, 6, 7]
    assert table.token_ids[2, :2].tolist() == [5, 6]
    assert table.is_final[:3].all()
    assert not table.block_tables[:, :3].any()
    table.check_invariants()


def test_progress_and_computed_tokens(table):
    for row in (0, 1, 2):
        table.admit(admitted(row, [1, 2, 3, 4]))
    table.advance(int_array([0, 1, 2]), int_array([4, 2, 1]))
    table.set_progress([(1, 0), (0, 3)])

    assert table.num_computed[:3].tolist() == [3, 0, 1]


def test_streamed_tokens_belong_to_the_prompt_until_it_is_final(table):
    table.admit(admitted(0, [1, 2], is_final=False))
    table.extend(AppendedTokens(row=0, token_ids=[3], is_final=False))
    table.extend(AppendedTokens(row=0, token_ids=[4], is_final=True))
    table.extend(AppendedTokens(row=0, token_ids=[5], is_final=True))

    assert table.token_ids[0, :5].tolist() == [1, 2, 3, 4, 5]
    assert numbers(table, 0) == (0, 5, 4)


def test_block_writes_are_one_assignment(table):
    table.write_blocks(np.array([(0, 1, 0, 7), (0, 1, 1, 3), (1, 1, 0, 9), (0, 2, 3, 1)]).T)

    assert table.block_tables[0, 1].tolist() == [7, 3, 0, 0]
    assert table.block_tables[1, 1].tolist() == [9, 0, 0, 0]
    assert table.block_tables[0, 2].tolist() == [0, 0, 0, 1]


def test_the_longest_sequence_still_takes_its_last_sampled_token(table):
    table.admit(admitted(0, [1] * 8))
    table.append(int_array([0]), int_array([8]), int_array([2]))

    assert table.token_ids[0].tolist() == [1] * 8 + [2]


@pytest.mark.parametrize(
    ("said", "expected", "progress"),
    [
        # all right, and one more
        ([6, 7, 8, 9], [1, 2, 3, 6, 7, 8, 9], (6, 7, 0)),
        # the second is wrong
        ([6, 5], [1, 2, 3, 6, 5], (4, 5, 0)),
        ([5], [1, 2, 3, 5], (3, 4, 0)),
        # a chunk that ends before the last: the others stay
        ([6, 7], [1, 2, 3, 6, 7, 8], (4, 6, 1)),
        ([6], [1, 2, 3, 6, 7, 8], (3, 6, 2)),
    ],
)
def test_drafts_become_tokens_as_far_as_they_are_right(table, said, expected, progress):
    table.admit(admitted(0, [1, 2, 3]))
    table.admit(admitted(1, [4, 4], num_computed_tokens=1))
    with_drafts(table, 6, 7, 8)
    table.check_invariants()
    table.advance(int_array([0, 1]), int_array([len(said), 1]))
    table.append(int_array([0] * len(said) + [1]), int_array([*range(3, 3 + len(said)), 2]), int_array([*said, 9]))

    computed, total, drafts = progress
    assert numbers(table, 0) == (computed, total, 3)
    assert table.num_drafts[0] == drafts
    assert table.token_ids[0, :total].tolist() == expected
    # a row without drafts in the same step
    assert (numbers(table, 1), table.token_ids[1, :3].tolist()) == ((2, 3, 2), [4, 4, 9])
    table.check_invariants()


def test_drafts_of_several_rows_differ_in_number(table):
    for row in (0, 1, 2):
        table.admit(admitted(row, [1, 2], num_computed_tokens=1))
    table.add_drafts(int_array([2, 0, 1]), int_array([[5, 6, 7], [-1, -1, -1], [8, -1, -1]]))

    assert table.num_drafts[:3].tolist() == [0, 1, 3]
    assert table.num_total[:3].tolist() == [2, 3, 5]
    assert table.token_ids[2, 2:5].tolist() == [5, 6, 7]
    assert table.token_ids[1, 2] == 8
    table.check_invariants()


def test_a_grant_is_an_upper_bound(table):
    table.admit(admitted(0, [1, 2, 3], num_computed_tokens=1))
    table.admit(admitted(1, [1, 2, 3], num_computed_tokens=3))
    table.admit(admitted(2, [1, 2, 3]))
    rows, num_tokens = table.granted(int_array([2, 1, 0]), int_array([2, 1, 4]))

    assert (rows.tolist(), num_tokens.tolist()) == ([2, 0], [2, 2])


def test_a_row_that_fails_has_nothing_left_to_compute(table):
    table.admit(admitted(0, [1, 2, 3]))
    with_drafts(table, 6, 7)
    table.advance(int_array([0]), int_array([3]))
    table.drop_drafts(int_array([0]))

    assert numbers(table, 0) == (3, 3, 3)
    table.check_invariants()


def test_drafts_stay_when_a_row_is_preempted(table):
    table.admit(admitted(0, [1, 2, 3]))
    with_drafts(table, 6, 7)
    table.set_progress([(0, 0)])

    assert (numbers(table, 0), table.num_drafts[0]) == ((0, 5, 3), 2)
    table.check_invariants()


def test_a_child_has_no_drafts_beyond_its_tokens(table):
    table.admit(admitted(0, [1, 2, 3]))
    with_drafts(table, 6, 7)
    for row, num_tokens in ((1, 2), (2, 3), (3, 4)):
        table.fork(
            ForkedSequence(
                parent_row=0, row=row, sequence_id=9, num_total_tokens=num_tokens, num_computed_tokens=1, seed=1
            )
        )

    assert table.num_drafts.tolist() == [2, 0, 0, 1]
    assert table.num_total.tolist() == [5, 2, 3, 4]
    table.check_invariants()


def test_what_the_core_appends_replaces_drafts(table):
    table.admit(admitted(0, [1, 2, 3]))
    with_drafts(table, 6, 7)
    table.extend(AppendedTokens(row=0, token_ids=[9]))

    assert table.token_ids[0, :4].tolist() == [1, 2, 3, 9]
    assert (numbers(table, 0), table.num_drafts[0]) == ((2, 4, 3), 0)


def test_a_released_row_leaves_no_drafts_to_the_next(table):
    for leave in (lambda: table.release(0), lambda: None):
        table.admit(admitted(0, [1, 2, 3]))
        with_drafts(table, 6, 7)
        leave()
        table.admit(admitted(0, [4, 5]))

        assert (numbers(table, 0), table.num_drafts[0]) == ((0, 2, 2), 0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.num_computed.__setitem__(0, 5),
        lambda table: table.num_computed.__setitem__(0, -1),
        lambda table: table.num_prompt.__setitem__(0, 5),
        lambda table: table.num_drafts.__setitem__(0, -1),
        # the prompt among the drafts; nothing left to compute before them; an input that is still arriving
        lambda table: table.num_drafts.__setitem__(0, 1),
        lambda table: (with_drafts(table), table.num_computed.__setitem__(0, 3)),
        lambda table: (with_drafts(table), table.is_final.__setitem__(0, False)),
        lambda table: table.token_ids.__setitem__((0, 1), -1),
        lambda table: table.block_tables.__setitem__((0, 0, 0), 10),
    ],
)
def test_invariants_see_damage(table, damage):
    table.admit(admitted(0, [1, 2, 3]))
    table.check_invariants()
    damage(table)

    with pytest.raises(AssertionError):
        table.check_invariants()


def test_a_wide_table_costs_no_memory_until_it_is_used():
    # 4 TiB of address space
    table = RowTable(num_rows=1 << 14, max_model_len=(1 << 26) - 1)
    table.admit(admitted(16_000, [1, 2, 3]))

    assert table.token_ids[16_000, :4].tolist() == [1, 2, 3, 0]
