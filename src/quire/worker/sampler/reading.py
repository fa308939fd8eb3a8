"""What is read off a step: tokens, log-probabilities, vectors, candidates. Each is a Reading, and all travel together.

A Reading names the tensors that it needs on the host, and then puts its part into the answer. Nothing of it counts
before `settle`: until then a step may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from quire.messages import NO_INTS, IntArray, StepOutput
from quire.worker.input_batch import InputBatch
from quire.worker.sampler.processors import RowFeature
from quire.worker.staging import Array

NOT_FINITE = "the model's logits are not finite (NaN or infinity), so no token can be chosen."


class Sampled:
    """The answer to a step as far as the sampler knows it. A row stands once for each token, in order."""

    def __init__(self) -> None:
        self.output = StepOutput(step=-1)
        # how many tokens are before each of the output's
        self.lengths: IntArray = NO_INTS
        # rows that computed what they had and get their token later: nothing of them counts
        self.late: IntArray = NO_INTS

    def be_late(self, rows: IntArray) -> None:
        if len(rows):
            self.late = np.concatenate([self.late, rows])
            self.output.counts["num_late_rows"] = len(self.late)

    def fail(self, row: int, reason: str, *, is_not_finite: bool = False) -> None:
        """The row gets nothing of this step. Unless the numbers were not finite, its request is to blame: the engine
        could do what was asked for, and did. The first reason stays."""
        output = self.output
        if row in output.failures:
            return
        output.failures[row] = reason
        if is_not_finite:
            output.counts["num_nan_rows"] = output.counts.get("num_nan_rows", 0) + 1
        else:
            output.blamed.append(row)


class Reading(Protocol):
    """Something of one step on its way to the host."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    def settle(self, arrays: Sequence[Array], sampled: Sampled) -> None:
        """Puts its part into the answer, out of the arrays of `tensors`."""


class StepReader(RowFeature, Protocol):
    """Whatever looks at the hidden states of a step beside those that tokens are sampled from."""

    def start(self, hidden_TE: Tensor, batch: InputBatch) -> Reading: ...
