"""Root mean square norm with a gate of SiLU, as Mamba 2 (the gate first) and Gated DeltaNet (the norm first) have it.

    gates_first:  y = x * silu(gate)          out = weight * round(y / rms(y))
    else:         n = round(weight * round(x / rms(x)))          out = n * silu(gate)

In float32, rounded to the type of x where Transformers does. The weight is one for all rows [..., width], or has a row
for each of the last but one dimension.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from quire.worker.kernels.reference.rms_norm import rms_norm


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool) -> Tensor:
    opened = F.silu(gate.float())
    if not gates_first:
        return (rms_norm(x, weight, eps).float() * opened).to(x.dtype)
    gated = x.float() * opened
    normed = rms_norm(gated, gated.new_ones(gated.shape[-1]), eps)
    return weight * normed.to(x.dtype)
