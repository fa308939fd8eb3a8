"""allowed_token_ids: nothing but these tokens may be chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.messages import AdmittedSequence, IntArray, int_array
from quire.worker.sampler.processors.processor import TokenPlaces, User
from quire.worker.staging import to_device


class AllowedTokenIds:
    """Keeps the logits of the allowed tokens and sets all others to -inf."""

    def state_of(self, sequence: AdmittedSequence) -> IntArray | None:
        allowed = sequence.sampling.allowed_token_ids
        return None if allowed is None else int_array(allowed)

    def state_of_child(self, parent: IntArray) -> IntArray:
        return parent

    def apply(self, logits_NV: Tensor, users: list[User[IntArray]]) -> None:
        positions = [user.position for user in users]
        places = TokenPlaces(positions, [user.state for user in users], logits_NV)
        kept = places.read()
        (index,) = to_device([int_array(positions)], logits_NV.device)
        logits_NV.index_fill_(0, index, -torch.inf)
        places.write(kept)
