"""The sampler's draws for few logits on a CPU, in a dozen array operations.

A pass of a small draft takes some 200 us, and the sampler's draw out of 1,856 logits as long again: it is made for many
rows and large vocabularies. This one takes 25 us without limits and 90 with top_k or top_p. It may differ from the
sampler's by rounding, where a uniform number falls between two tokens, which a proposal may. CPU time of one thread.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.messages import IntArray
from quire.worker.sampler.choose import DrawSettings, choose_tokens
from quire.worker.staging import Array

# Beyond so many logits in all, sorting them whole takes longer than the sampler does.
_MOST_LOGITS = 1 << 13


def choose_quickly(logits_NV: Tensor, settings: DrawSettings | None) -> Tensor:
    """A token for each row, as `choose_tokens` has it; what is too large is left to that."""
    if settings is None or not logits_NV.is_cpu or logits_NV.numel() > _MOST_LOGITS:
        return choose_tokens(logits_NV, settings)[0]
    logits = logits_NV.numpy()
    is_drawing = settings.temperature > 0
    if is_drawing.all():
        return torch.from_numpy(_draw(logits, settings))
    tokens = logits.argmax(axis=1)
    drawing = np.flatnonzero(is_drawing)
    tokens[drawing] = _draw(logits[drawing], settings.select(drawing))
    return torch.from_numpy(tokens)


def _draw(logits_nV: Array, settings: DrawSettings) -> IntArray:
    """Where the running sum of weights passes uniform * total: in the order of ids, with limits in that of weights."""
    vocab_size = logits_nV.shape[1]
    weights_nV = np.exp((logits_nV - logits_nV.max(axis=1, keepdims=True)) / settings.temperature[:, None])
    if settings.min_p.any():
        weights_nV *= weights_nV >= settings.min_p[:, None]
    has_limit = (settings.top_k < vocab_size) | (settings.top_p < 1.0)
    if not has_limit.any():
        sums_nV = weights_nV.cumsum(axis=1, dtype=np.float64)
        return _first_above(sums_nV, settings.uniform * sums_nV[:, -1]).clip(max=vocab_size - 1)
    ids_nV = np.argsort(-weights_nV, axis=1)
    ids_nV[~has_limit] = np.arange(vocab_size)
    sums_nV = np.take_along_axis(weights_nV, ids_nV, axis=1).cumsum(axis=1, dtype=np.float64)
    rows = np.arange(len(sums_nV))
    top_k = np.minimum(settings.top_k, vocab_size)
    needed = np.where(settings.top_p < 1.0, settings.top_p * sums_nV[rows, top_k - 1], np.inf)
    num_kept = np.minimum((sums_nV < needed[:, None]).sum(axis=1) + 1, top_k)
    places = _first_above(sums_nV, settings.uniform * sums_nV[rows, num_kept - 1])
    return ids_nV[rows, np.minimum(places, num_kept - 1)]


def _first_above(sums_nV: Array, target_n: Array) -> IntArray:
    places: IntArray = (sums_nV <= target_n[:, None]).sum(axis=1)
    return places
