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
    rows = Rows(1, 64)
    row = rows.take(0, 0, 0, np.arange(31, dtype=np.int32))
    one = np.array([row])
    rows.settle_drafts(one, np.array([29]), np.array([31]), 0, np.array([granted]), np.array([growth]))
    assert (int(rows.num_computed[row]), int(rows.num_total[row])) == (computed, total)
