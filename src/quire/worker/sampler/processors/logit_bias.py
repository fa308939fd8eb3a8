"""logit_bias: a number added to the logits of chosen tokens."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.messages import AdmittedSequence, IntArray, int_array
from quire.worker.sampler.processors.processor import TokenPlaces, User

Bias: TypeAlias = tuple[IntArray, npt.NDArray[np.float32]]


class LogitBias:
    """Token ids and what to add to them."""

    def state_of(self, sequence: AdmittedSequence) -> Bias | None:
        bias = sequence.sampling.logit_bias
        return (int_array(list(bias)), np.array(list(bias.values()), dtype=np.float32)) if bias else None

    def state_of_child(self, parent: Bias) -> Bias:
        return parent

    def apply(self, logits_NV: Tensor, users: list[User[Bias]]) -> None:
        places = TokenPlaces([user.position for user in users], [user.state[0] for user in users], logits_NV)
        places.write(places.read() + places.each([user.state[1] for user in users]))
