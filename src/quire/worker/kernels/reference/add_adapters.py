"""Low-rank products that are added to the output of a linear layer, each token with those of its adapter."""

from __future__ import annotations

from torch import Tensor

from quire.worker.kernels.reference.adapter_format import AdapterFormat


def add_adapters(
    y_TN: Tensor,
    x_TC: Tensor,
    slots_T: Tensor,
    ranks_L: Tensor,
    a_LE: Tensor,
    b_LE: Tensor,
    parts_P: list[int],
    most_rank: int,
) -> None:
    """y += B (A x) in place, float32 inside, rounded once. A token of slot -1 has no adapter, and its row is not
    touched. Columns of y belong to parts, one behind the other; each part has an A of its own.
    `AdapterFormat` says how slots of `most_rank` are laid out; ranks_L are those that the adapters in them have."""
    form = AdapterFormat(x_TC.shape[1], tuple(parts_P), x_TC.dtype)
    for slot in slots_T.unique().tolist():
        if slot < 0 or not ranks_L[slot]:
            continue
        is_own_T = slots_T == slot
        x = x_TC[is_own_T].float()
        y = y_TN[is_own_T].float()
        start = 0
        for a_GC, b_NG in zip(*form.unpack(a_LE[slot], b_LE[slot], int(ranks_L[slot])), strict=True):
            y[:, start : start + len(b_NG)] += x @ a_GC.float().t() @ b_NG.float().t()
            start += len(b_NG)
        y_TN[is_own_T] = y.to(y_TN.dtype)
