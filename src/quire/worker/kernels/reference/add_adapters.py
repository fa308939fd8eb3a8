"""Low-rank products that are added to the output of a linear layer, each token with those of its adapter."""

from __future__ import annotations

from torch import Tensor


def add_adapters(
    y_TN: Tensor, x_TC: Tensor, slots_T: Tensor, ranks_L: Tensor, a_LPGC: Tensor, b_LGN: Tensor, parts_P: list[int]
) -> None:
    """y += B (A x) in place, float32 inside, rounded once. A token of slot -1 has no adapter, and its row is not
    touched. Columns of y belong to parts, one behind the other; each part has an A of its own."""
    for slot in slots_T.unique().tolist():
        if slot < 0:
            continue
        rank = int(ranks_L[slot])
        is_own_T = slots_T == slot
        x = x_TC[is_own_T].float()
        y = y_TN[is_own_T].float()
        b_GN = b_LGN[slot, :rank].float()
        start = 0
        for part, width in enumerate(parts_P):
            low = x @ a_LPGC[slot, part, :rank].float().t()
            y[:, start : start + width] += low @ b_GN[:, start : start + width]
            start += width
        y_TN[is_own_T] = y.to(y_TN.dtype)
