"""The best next tokens of rows whose tokens the core chooses (beam search, 3.4.4): ids and log-probabilities.

The whole row is normalised, float32 logits over temperature. Then penalties and forms act on the log-probabilities,
which are not normalised again: so it is in Transformers, and so what a token costs does not depend on the others. The
best come out in the one order of tokens (`kernels/reference/order.py`): log-probability falling, token id rising. A
row's candidates depend on its own logits and tokens alone, bit for bit. Called by Sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import NO_INTS, Candidates, IntArray
from quire.worker.kernels.reference.order import ids_of, order_keys
from quire.worker.sampler.choose import rows_in_slice
from quire.worker.sampler.reading import NOT_FINITE, Sampled
from quire.worker.staging import Array, to_device

# A row is first reduced to so many maxima, or to this many times the candidates that are wanted.
_MAXIMA = 512
_MAXIMA_PER_CANDIDATE = 8


@dataclass(frozen=True)
class CandidateReading:
    """Candidates of some rows on their way to the host: token ids and log-probabilities, as wide as the widest row."""

    rows_n: IntArray
    counts_n: IntArray
    # with what all probabilities of a row come to
    tensors: tuple[Tensor, ...]
    # of these rows, those that get theirs later
    late: IntArray = field(default_factory=lambda: NO_INTS)
    # why a row has nothing to choose from, where a processor knows
    reasons: Mapping[int, str] = field(default_factory=dict)

    def settle(self, arrays: Sequence[Array], sampled: Sampled) -> None:
        columns = (array.tolist() for array in arrays)
        late = set(self.late.tolist())
        sampled.be_late(self.late)
        for row, count, ids, values, total in zip(self.rows_n.tolist(), self.counts_n.tolist(), *columns, strict=True):
            if row in late:
                continue
            if np.isfinite(values[0]):
                # what a form excludes stands at the end
                num_left = next((place for place, value in enumerate(values[:count]) if value == -np.inf), count)
                sampled.output.candidates[row] = Candidates(ids[:num_left], values[:num_left], total)
            elif values[0] == -np.inf and row in self.reasons:
                sampled.fail(row, self.reasons[row])
            else:
                sampled.fail(row, NOT_FINITE, is_not_finite=True)


def read_candidates(
    logits_nV: Tensor,
    rows_n: IntArray,
    counts_n: IntArray,
    temperature_n: npt.NDArray[np.float32],
    penalise: Callable[[Tensor, slice], None] | None = None,
) -> CandidateReading:
    """Rows with a count above 0, at least one. A temperature of 0 leaves logits as they are. `penalise` changes the
    log-probabilities of some of these rows, where any has penalties or a form."""
    count = min(int(counts_n.max()), logits_nV.shape[1])
    divisor_n = np.where(temperature_n > 0, temperature_n, np.float32(1))
    # in slices: what is needed beside the logits does not grow with the number of rows
    step = rows_in_slice(logits_nV.shape[1], logits_nV.device)
    parts = []
    for start in range(0, len(rows_n), step):
        part = slice(start, min(start + step, len(rows_n)))
        logprobs_nV = _logprobs(logits_nV[part], divisor_n[part])
        total_n = torch.zeros(len(logprobs_nV), device=logits_nV.device)
        if penalise is not None:
            penalise(logprobs_nV, part)
            total_n = logprobs_nV.logsumexp(-1)
        parts.append((*_best(logprobs_nV, count), total_n))
    return CandidateReading(rows_n, counts_n, tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _logprobs(logits_nV: Tensor, divisor_n: npt.NDArray[np.float32]) -> Tensor:
    if (divisor_n != 1).any():
        logits_nV = logits_nV / to_device([divisor_n], logits_nV.device)[0][:, None]
    return logits_nV.log_softmax(-1)


def _best(logprobs_nV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if logprobs_nV.is_cpu:
        ids_nK = torch.from_numpy(np.stack([_first_in_order(row_V, count) for row_V in logprobs_nV.numpy()]))
    else:
        ids_nK = ids_of(order_keys(logprobs_nV).topk(count, dim=-1).values, logprobs_nV.shape[1])
    return ids_nK, logprobs_nV.gather(1, ids_nK)


def _first_in_order(values_V: npt.NDArray[np.float32], count: int) -> IntArray:
    """Ids of the greatest `count` values, the lowest ids among equals. Of a row with NaN: any.

    Exact, and a fifth of the time of `topk` for 150,000 values: the row is folded into a few maxima. As many values as
    there are maxima at or above a bound are at or above it too, so the count-th greatest maximum bounds what is sorted.
    """
    num_maxima = max(_MAXIMA, _MAXIMA_PER_CANDIDATE * count)
    num_folded = len(values_V) // num_maxima * num_maxima
    maxima = values_V[:num_folded].reshape(-1, num_maxima).max(axis=0) if num_folded else values_V
    bound = np.partition(maxima, len(maxima) - count)[len(maxima) - count]
    ids = np.flatnonzero(values_V >= bound)
    if len(ids) < count:  # comparisons with NaN are false
        return np.arange(count)
    return ids[np.argsort(-values_V[ids], kind="stable")[:count]]
