"""The two numbers of rows, where a step's answer comes behind a decision that did not know of it."""

import numpy as np
import pytest

from quire.engine_core.rows import Rows


@pytest.mark.parametrize(
    ("granted", "growth", "computed", "total"),
    [
        # the later step reaches the last token, and samples behind it
        (2, 1, 31, 32),
        (4, 4, 31, 35),
        # it was decided for one token, and two are to be computed: an accepted draft is computed once more
        (1, 1, 30, 31),
        (0, 0, 29, 31),
    ],
)
def test_a_promise_counts_where_the_later_step_reaches_the_last_token(
    granted: int, growth: int, computed: int, total: int
) -> None:
    assert settled(64, granted, growth) == (computed, total)


@pytest.mark.parametrize(("max_total", "total"), [(31, 31), (32, 31), (33, 32)])
def test_nothing_is_promised_behind_the_last_token_but_one(max_total: int, total: int) -> None:
    """It was promised when nobody knew how many tokens the step before would bring."""
    assert settled(max_total, 2, 1) == (31, total)


@pytest.mark.parametrize(("computed", "total"), [(30, 31), (31, 32)])
def test_one_that_was_set_back_has_what_a_later_step_reaches(computed: int, total: int) -> None:
    """A step has brought it more tokens than those that were known when it was set back."""
    rows = Rows(1, 64)
    row = rows.take(0, 0, 0, np.arange(29, dtype=np.int32))
    rows.set_limits(row, 64, 0)
    rows.set_back(row, 0)
    one = np.array([row])
    rows.grant(one, np.array([computed]))
    rows.settle_drafts(one, np.array([30]), np.array([31]), 0, np.array([computed]), np.array([1]))
    assert (int(rows.num_computed[row]), int(rows.num_total[row])) == (computed, total)


def settled(max_total: int, granted: int, growth: int) -> tuple[int, int]:
    """(computed, total) where 29 of 31 tokens are computed, and so much was decided since."""
    rows = Rows(1, 64)
    row = rows.take(0, 0, 0, np.arange(31, dtype=np.int32))
    rows.set_limits(row, max_total, 0)
    one = np.array([row])
    rows.settle_drafts(one, np.array([29]), np.array([31]), 0, np.array([granted]), np.array([growth]))
    return int(rows.num_computed[row]), int(rows.num_total[row])
