"""The failpoint nan_row: a row whose logits are not finite, to see that it fails alone."""

from __future__ import annotations

from torch import Tensor

from quire.failpoints import failpoint
from quire.messages import IntArray
from quire.worker.row_table import RowTable


def spoil(logits_NV: Tensor, rows_N: IntArray, table: RowTable) -> None:
    """Called while the failpoint is armed; each row passes it by itself, and the point sees the tokens of that row."""
    for place, row in enumerate(rows_N.tolist()):
        if failpoint("nan_row", table.tokens_of(row)):
            logits_NV[place] = float("nan")
