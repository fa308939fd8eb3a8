"""Sharing out a token budget that is too small for all (4.5). Arithmetic on columns; knows no requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.messages import IntArray


def promised_to_earliest(is_behind: npt.NDArray[np.bool_], wanted: IntArray, share: float, budget: int) -> IntArray:
    """The rule of progress: a share of the budget for the first of those that are behind.

    The entries stand by arrival, so it is the earliest. Without it, a long prompt that has started
    may never get on while shorter ones keep coming (4.5.3 bounds only the wait to the first chunk).
    """
    promised = np.zeros(len(wanted), dtype=np.int64)
    if share > 0 and is_behind.any():
        first = int(is_behind.argmax())
        promised[first] = min(int(wanted[first]), max(1, int(share * budget)))
    return promised


def share_out(wanted: IntArray, keys: IntArray, budget: int, promised: IntArray) -> IntArray:
    """Each gets what those with smaller keys leave; of equal keys the earlier entry goes first."""
    order = np.argsort(keys, kind="stable")
    missing = (wanted - promised)[order]
    before = np.cumsum(missing) - missing
    granted = np.empty(len(wanted), dtype=np.int64)
    granted[order] = np.minimum(np.maximum(budget - int(promised.sum()) - before, 0), missing)
    return granted + promised
