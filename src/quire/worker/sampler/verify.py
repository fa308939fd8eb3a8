"""Drafts against draws: the longest beginning of a row's drafts that the model would have said itself.

The sampler draws a token at each position of a row as if the drafts before it were given: same processors, and the
uniform number of (seed, position). A draft that equals the draw is right. The first draw that differs is still the
model's own token, because everything before it is; the draws after it followed a wrong token and mean nothing. So a row
says the same with drafts as without, token for token, and its distribution is the model's without any correction.

    drafts    5 8 1 3          lengths     7  8  9 10 11
    draws     5 8 2 3 6        is kept     x  x  x  .  .         the row says 5 8 2
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.messages import IntArray
from quire.worker.row_table import RowTable


def kept_draws(table: RowTable, rows_N: IntArray, lengths_N: IntArray, tokens_N: IntArray) -> npt.NDArray[np.bool_]:
    """Which draws are of the row: those up to the first that differs from the draft in its place. Draws of a row stand
    side by side, lengths rising."""
    is_wrong_N = (lengths_N < table.num_total[rows_N]) & (table.token_ids[rows_N, lengths_N] != tokens_N)
    num_wrong_before_N = is_wrong_N.cumsum() - is_wrong_N
    # of all rows before, too: what the first draw of a row has counts for nothing
    is_first_N = np.append(True, rows_N[1:] != rows_N[:-1])
    first_N = np.maximum.accumulate(np.where(is_first_N, np.arange(len(rows_N)), 0))
    return num_wrong_before_N == num_wrong_before_N[first_N]
