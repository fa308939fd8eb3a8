"""Penalties on what was said already.

    repetition   tokens of prompt and output: a positive logit is divided by it, a negative one multiplied
    frequency    tokens of the output: minus the penalty for each time
    presence     tokens of the output: minus the penalty once

Only the tokens that a row contains are touched, not the vocabulary. A row's counts follow its tokens in the row table
lazily: new ones are added when the row samples, so a child of a fork simply starts to count its own tokens. Drafts are
counted for the question at hand, in copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import AdmittedSequence, IntArray, int_array
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import TokenPlaces, User

# Fewer new tokens than this are added one by one, more of them by sorting all.
_FEW = 32


@dataclass(frozen=True)
class Strengths:
    """The parameters of a row."""

    repetition: float
    frequency: float
    presence: float


class TokenCounts:
    """The different tokens of a row, and how often each one is in the output."""

    def __init__(self, strengths: Strengths) -> None:
        self.strengths = strengths
        self._num_counted = 0
        self._size = 0
        self._place_by_token: dict[int, int] = {}
        self._tokens: IntArray = np.empty(0, dtype=np.int64)
        self._counts: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)

    @property
    def tokens(self) -> IntArray:
        return self._tokens[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: self._size]

    def with_drafts(self, drafts: Sequence[int]) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """Copies of tokens and counts, as if these came next."""
        new = [token for token in dict.fromkeys(drafts) if token not in self._place_by_token]
        place_by_new = {token: place for place, token in enumerate(new, start=self._size)}
        tokens = np.append(self.tokens, int_array(new))
        counts = np.append(self.counts, np.zeros(len(new), dtype=np.float32))
        for token in drafts:
            counts[place_by_new[token] if token in place_by_new else self._place_by_token[token]] += 1
        return tokens, counts

    def follow(self, tokens: npt.NDArray[np.int32], num_prompt: int) -> None:
        """Count what is new in a row's tokens. Only repetition looks at the prompt."""
        num_new = len(tokens) - self._num_counted
        if 0 <= num_new < _FEW and self._num_counted >= num_prompt:
            for token in tokens[self._num_counted :].tolist():
                self._add(token)
        else:
            self._recount(tokens, num_prompt)
        self._num_counted = len(tokens)

    def _recount(self, tokens: npt.NDArray[np.int32], num_prompt: int) -> None:
        said, times = np.unique(tokens[num_prompt:], return_counts=True)
        prompt = tokens[:num_prompt] if self.strengths.repetition != 1.0 else tokens[:0]
        unsaid = np.setdiff1d(prompt, said)
        self._tokens = np.concatenate([said, unsaid]).astype(np.int64)
        self._counts = np.concatenate([times, np.zeros(len(unsaid))]).astype(np.float32)
        self._size = len(self._tokens)
        self._place_by_token = {token: place for place, token in enumerate(self._tokens.tolist())}

    def _add(self, token: int) -> None:
        place = self._place_by_token.setdefault(token, self._size)
        if place == self._size:
            if self._size == len(self._tokens):
                room = np.zeros(max(_FEW, self._size), dtype=np.int64)
                self._tokens = np.concatenate([self._tokens, room])
                self._counts = np.concatenate([self._counts, room.astype(np.float32)])
            self._tokens[place], self._counts[place] = token, 0
            self._size += 1
        self._counts[place] += 1


class Penalties:
    """All three in one pass, in the order repetition, frequency, presence."""

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def state_of(self, sequence: AdmittedSequence) -> TokenCounts | None:
        sampling = sequence.sampling
        strengths = Strengths(sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        return None if strengths == Strengths(1.0, 0.0, 0.0) else TokenCounts(strengths)

    def state_of_child(self, parent: TokenCounts) -> TokenCounts:
        return TokenCounts(parent.strengths)

    def apply(self, logits_NV: Tensor, users: list[User[TokenCounts]]) -> None:
        strengths = [user.state.strengths for user in users]
        tokens, token_counts = self._counted(users)
        places = TokenPlaces([user.position for user in users], tokens, logits_NV)
        counts = places.each(token_counts)
        repetition = places.repeated([strength.repetition for strength in strengths])
        logits = places.read()
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits -= places.repeated([strength.frequency for strength in strengths]) * counts
        logits -= places.repeated([strength.presence for strength in strengths]) * (counts > 0)
        places.write(logits)

    def _counted(self, users: list[User[TokenCounts]]) -> tuple[list[IntArray], list[npt.NDArray[np.float32]]]:
        """For each user, its different tokens and how often each one is in the output, drafts included."""
        table, rows = self._table, [user.row for user in users]
        num_prompt, num_verified = table.num_prompt[rows].tolist(), table.num_verified(rows).tolist()
        all_tokens, all_counts = [], []
        for user, prompt, verified in zip(users, num_prompt, num_verified, strict=True):
            state = user.state
            state.follow(table.token_ids[user.row, :verified], prompt)
            tokens, counts = state.tokens, state.counts
            if user.length > verified:
                tokens, counts = state.with_drafts(table.token_ids[user.row, verified : user.length].tolist())
            all_tokens.append(tokens)
            all_counts.append(counts)
        return all_tokens, all_counts
