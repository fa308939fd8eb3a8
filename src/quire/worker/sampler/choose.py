"""From processed logits to one token a row, and the parameters that say how. What is done with them is a kernel's."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import IntArray
from quire.worker import kernels
from quire.worker.kernels.reference.draw import rows_in_slice

__all__ = ["DrawSettings", "best_tokens", "choose_tokens", "rows_in_slice"]


@dataclass(frozen=True)
class DrawSettings:
    """Parameters of rows, one entry a row. A temperature of 0 means greedy."""

    temperature: npt.NDArray[np.float32]
    top_k: IntArray
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float64]

    def select(self, index: IntArray) -> DrawSettings:
        return DrawSettings(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


def choose_tokens(
    logits_NV: Tensor, settings: DrawSettings | None, rows_n: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(token, greatest logit) of these rows, or of all. Without settings every row is greedy."""
    if settings is None:
        return kernels.best_tokens(logits_NV, rows_n)
    return kernels.choose_tokens(
        logits_NV,
        rows_n,
        temperature_n=torch.from_numpy(settings.temperature),
        top_k_n=torch.from_numpy(settings.top_k),
        top_p_n=torch.from_numpy(settings.top_p),
        min_p_n=torch.from_numpy(settings.min_p),
        uniform_n=torch.from_numpy(settings.uniform),
    )


def best_tokens(logits_NV: Tensor) -> Tensor:
    """The greatest logit's token; the lowest id among equals. A row with a NaN gets the place of the NaN."""
    return kernels.best_tokens(logits_NV)[0]
