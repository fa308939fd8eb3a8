"""Forms of outputs that only vLLM has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

from quire.outputs import Logprob

Position = dict[int, Logprob]


class FlatLogprobs(Sequence[Position]):
    """Log-probabilities of all positions in a few long lists: of position i those from start_indices[i] to
    end_indices[i]. As a sequence it is what it is without flat_logprobs: a dictionary for each position."""

    def __init__(self, positions: Iterable[Position | None] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        for position in positions:
            self.start_indices.append(len(self.token_ids))
            for token_id, entry in (position or {}).items():
                self.token_ids.append(token_id)
                self.logprobs.append(entry.logprob)
                self.ranks.append(entry.rank)
                self.decoded_tokens.append(entry.decoded_token)
            self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Position: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> Position | FlatLogprobs:
        if isinstance(index, slice):
            return FlatLogprobs([self[place] for place in range(*index.indices(len(self)))])
        return {
            self.token_ids[place]: Logprob(self.logprobs[place], self.ranks[place], self.decoded_tokens[place])
            for place in range(self.start_indices[index], self.end_indices[index])
        }
