"""watermark_config: of the tokens that may be sampled, the one that the key and the tokens before it prefer.

Comes last, and leaves a row nothing else to choose from, so that whatever is asked after it (top_k, top_p, drafts) gets
the same token. `quire/watermark.py` says what a mark is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config.watermark import Watermark
from quire.messages import AdmittedSequence
from quire.watermark import uniforms
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import User

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# the heaviest tokens are sorted first: these mostly reach the share of top_p
_NUCLEUS = 1024


@dataclass(frozen=True)
class Marked:
    """How a row that is marked draws."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class WatermarkRule:
    """Of rows that draw."""

    def __init__(self, table: RowTable, watermark: Watermark | None) -> None:
        self._table = table
        self._watermark = watermark

    def state_of(self, sequence: AdmittedSequence) -> Marked | None:
        sampling = sequence.sampling
        if self._watermark is None or not sampling.watermarking or sequence.num_candidates:
            return None
        return Marked(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    def state_of_child(self, parent: Marked) -> Marked:
        return parent

    def apply(self, logits_NV: Tensor, users: list[User[Marked]]) -> None:
        assert self._watermark is not None
        for user in users:
            output = self._table.token_ids[user.row, self._table.num_prompt[user.row] : user.length]
            context = new_context(output, self._watermark.context_width)
            if context is None:
                continue
            logits_V = logits_NV[user.position]
            weights = _weights_of(logits_V, user.state)
            if weights is None:
                continue
            ids = _kept(weights, user.state)
            numbers = uniforms(self._watermark, context, ids)
            with np.errstate(divide="ignore"):
                token = int(ids[np.argmax(np.log(numbers) / weights[ids])])
            value = logits_V[token].clone()
            logits_V.fill_(-torch.inf)
            logits_V[token] = value


def new_context(output: npt.NDArray[np.integer], width: int) -> npt.NDArray[np.integer] | None:
    """The last tokens of an output; None where there are too few, or the same stood there before."""
    if len(output) < width:
        return None
    context = output[-width:]
    num_places = len(output) - width
    is_same = np.ones(num_places, dtype=np.bool_)
    for place in range(width):
        is_same &= output[place : place + num_places] == context[place]
    return None if is_same.any() else context


def _weights_of(logits_V: Tensor, how: Marked) -> Floats | None:
    """Of all tokens, the heaviest has 1; None: nothing can be drawn, and the row fails as it does without a mark."""
    logits = logits_V.cpu().numpy().astype(np.float64)
    greatest = logits.max()
    if not np.isfinite(greatest):
        return None
    weights: Floats = np.exp((logits - greatest) / np.float64(np.float32(how.temperature)))
    return weights


def _kept(weights: Floats, how: Marked) -> Ids:
    """The tokens that min_p, top_k and top_p leave, as they leave them to a draw: equal ones by their ids."""
    ids: Ids = np.flatnonzero(weights >= max(how.min_p, np.finfo(np.float64).tiny))
    if 0 < how.top_k < len(ids):
        ids = _heaviest(weights, ids, how.top_k)
    if how.top_p < 1.0:
        needed = how.top_p * weights[ids].sum()
        most = min(_NUCLEUS, len(ids))
        first = _heaviest(weights, ids, most)
        sums = weights[first].cumsum()
        if sums[-1] < needed:
            first = _heaviest(weights, ids, len(ids))
            sums = weights[first].cumsum()
        ids = first[: min(int((sums < needed).sum()) + 1, len(first))]
    return ids


def _heaviest(weights: Floats, ids: Ids, count: int) -> Ids:
    """In their order: weights falling, then ids rising."""
    if count < len(ids):
        least = np.partition(weights[ids], len(ids) - count)[len(ids) - count]
        ids = ids[weights[ids] >= least]
    first: Ids = ids[np.argsort(-weights[ids], kind="stable")][:count]
    return first
