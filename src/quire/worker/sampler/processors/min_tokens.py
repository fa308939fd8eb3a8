"""min_tokens: no end token and no stop token before so many tokens of output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.messages import AdmittedSequence, IntArray, int_array
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import TokenPlaces, User


@dataclass(frozen=True)
class Held:
    """Tokens that are excluded until the output has so many."""

    min_tokens: int
    token_ids: IntArray


class MinTokens:
    """Excludes the stop tokens of a row as long as its output is short. `ignore_eos` leaves the end tokens alone."""

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def state_of(self, sequence: AdmittedSequence) -> Held | None:
        sampling = sequence.sampling
        ids = sampling.stop_token_ids + ([] if sampling.ignore_eos else sequence.eos_token_ids)
        return Held(sampling.min_tokens, int_array(ids)) if sampling.min_tokens and ids else None

    def state_of_child(self, parent: Held) -> Held:
        return parent

    def apply(self, logits_NV: Tensor, users: list[User[Held]]) -> None:
        num_prompt = self._table.num_prompt
        users = [user for user in users if user.length - num_prompt[user.row] < user.state.min_tokens]
        if users:
            ids = [user.state.token_ids for user in users]
            TokenPlaces([user.position for user in users], ids, logits_NV).write(-torch.inf)
