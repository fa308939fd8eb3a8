"""What a decoding method is: an object that sees the tokens of its request and answers with verbs (3.5.2).

One object serves one request and may keep state. It sees sequences, never blocks: whatever it forks, appends and frees
is shared, copied and given back by the KV cache manager.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from quire.engine_core.request import Request, Sequence, Shape
from quire.messages import Candidates, TokenLogprobs


class Verbs(Protocol):
    """What a decoding method may do."""

    def fork(self, parent: Sequence, index: int, num_total_tokens: int, num_computed_tokens: int) -> Sequence:
        """A child that shares the parent's first num_total_tokens tokens and all blocks that they lie in.

        Fork before anything is appended to the parent: the worker copies it as the last step left it.
        """

    def append(self, sequence: Sequence, token_id: int) -> None:
        """The sequence grows by a token that the method chose."""

    def drop(self, sequence: Sequence) -> None:
        """The sequence ends and its blocks go back; its row stays set aside for a later fork. No client hears of it."""

    def emit(self, request: Request, output: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        """Tokens of an output for the client; they are never taken back."""

    def finish(self, request: Request, output: int, finish_reason: str, stop_reason: int | None = None) -> None:
        """An output ends; the request ends with the last one, and whatever sequences it has left with it."""


class DecodingMethod(Shape, Protocol):
    """How the tokens of one request are chosen. One that raises ends its request."""

    def after_token(self, sequence: Sequence, verbs: Verbs) -> bool:
        """Called once a watched sequence got a sampled token, before stop rules. False: watch it no more."""

    def after_candidates(self, request: Request, answers: Mapping[int, Candidates], verbs: Verbs) -> None:
        """Called with the answers of a step, by index of the sequence, for all that are computed as far as they go.

        Not all sequences of a request answer in one step. After a preemption an answer may come twice for one place.
        """
