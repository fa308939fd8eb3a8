"""allowed_token_ids: nothing but these tokens may be chosen.

A row keeps a bit for each token, so that a list as long as the vocabulary costs a step no more than a short one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.messages import AdmittedSequence, IntArray, int_array
from quire.worker.kernels import apply_bitmask
from quire.worker.sampler.processors.processor import User
from quire.worker.staging import to_device

_BITS = 32
Words = npt.NDArray[np.int32]


class AllowedTokenIds:
    """Sets the logits of all tokens but the allowed ones to -inf."""

    def state_of(self, sequence: AdmittedSequence) -> Words | None:
        allowed = sequence.sampling.allowed_token_ids
        return None if allowed is None else _words(int_array(allowed))

    def state_of_child(self, parent: Words) -> Words:
        return parent

    def apply(self, logits_NV: Tensor, users: list[User[Words]]) -> None:
        # tokens beyond the vocabulary can neither be chosen nor be excluded
        width = min(max(len(user.state) for user in users), -(-logits_NV.shape[1] // _BITS))
        mask_nW = np.zeros((len(users), width), dtype=np.int32)
        for mask_W, user in zip(mask_nW, users, strict=True):
            words = user.state[:width]
            mask_W[: len(words)] = words
        positions = int_array([user.position for user in users])
        index_n, masks = to_device([positions, mask_nW], logits_NV.device)
        apply_bitmask(logits_NV, index_n, masks)


def _words(ids: IntArray) -> Words:
    ids = ids[ids >= 0]
    words = np.zeros(int(ids.max(initial=0)) // _BITS + 1, dtype=np.uint32)
    np.bitwise_or.at(words, ids // _BITS, np.uint32(1) << (ids % _BITS).astype(np.uint32))
    return words.view(np.int32)
