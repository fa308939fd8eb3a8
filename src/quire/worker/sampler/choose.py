"""From processed logits to one token a row: argmax, or temperature, min_p, top_k, top_p and one uniform number.

Greedy rows and drawing rows may be mixed. Drawing rows go on by kind (no limit, top_k, top_p alone) and in slices, and
nothing about a row depends on which others are in its slice.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import IntArray
from quire.worker.sampler.draw import draw_from_all, draw_from_top_k, draw_from_top_p
from quire.worker.staging import to_device

# Rows are drawn in slices of at most so many logits. On a CPU they stay in the cache; elsewhere top_p sorts a slice,
# which needs some 40 bytes a logit that the KV cache cannot have.
_SLICE_CPU, _SLICE_OTHER = 1 << 20, 1 << 24


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


def choose_tokens(logits_NV: Tensor, settings: DrawSettings | None) -> tuple[Tensor, Tensor]:
    """(token, greatest logit) of each row. Without settings every row is greedy: an argmax and nothing else."""
    tokens_N = best_tokens(logits_NV)
    top_N = logits_NV.gather(1, tokens_N[:, None])[:, 0]
    if settings is not None:
        is_drawing = settings.temperature > 0
        has_top_k = settings.top_k < logits_NV.shape[1]
        has_top_p = settings.top_p < 1.0
        for is_kind in (~has_top_k & ~has_top_p, has_top_k, ~has_top_k & has_top_p):
            for index in _slices(np.flatnonzero(is_drawing & is_kind), logits_NV):
                (index_n,) = to_device([index], logits_NV.device)
                tokens_N[index_n] = _draw(logits_NV[index_n], top_N[index_n], settings.select(index))
    return tokens_N, top_N


def best_tokens(logits_NV: Tensor) -> Tensor:
    """The greatest logit's token; the lowest id among equals. A row with a NaN gets the place of the NaN."""
    if logits_NV.is_cpu:
        # numpy's argmax uses vector instructions, torch's does not: 15 against 130 us for 150,000 logits
        return torch.from_numpy(logits_NV.numpy().argmax(axis=1))
    return logits_NV.argmax(dim=1)


def rows_in_slice(vocab_size: int, device: torch.device) -> int:
    """How many rows are drawn at once at most: what a step needs beyond its logits grows no further."""
    return max(1, (_SLICE_CPU if device.type == "cpu" else _SLICE_OTHER) // vocab_size)


def _slices(index: IntArray, logits_NV: Tensor) -> list[IntArray]:
    size = rows_in_slice(logits_NV.shape[1], logits_NV.device)
    return [index[start : start + size] for start in range(0, len(index), size)]


def _draw(logits_nV: Tensor, top_n: Tensor, settings: DrawSettings) -> Tensor:
    """Tokens of rows of one kind. `logits_nV` is consumed.

    Weights are exp((logit - greatest) / temperature): the most probable token has weight 1 and nothing needs to be
    normalised, so min_p is a comparison.
    """
    temperature_n, top_k_n, top_p_n, min_p_n, uniform_n = to_device(
        [settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.uniform], logits_nV.device
    )
    weights_nV = logits_nV.sub_(top_n[:, None]).div_(temperature_n[:, None]).exp_()
    if settings.min_p.any():
        weights_nV.mul_(weights_nV >= min_p_n[:, None])
    greatest_k = int(settings.top_k.max())
    if settings.top_k.min() < logits_nV.shape[1]:
        return draw_from_top_k(weights_nV, top_k_n, greatest_k, top_p_n, uniform_n)
    if settings.top_p.min() < 1.0:
        return draw_from_top_p(weights_nV, top_p_n, uniform_n)
    return draw_from_all(weights_nV, uniform_n)
