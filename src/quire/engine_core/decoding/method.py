"""What a decoding method is: an object that sees tokens of watched sequences and answers with verbs (3.5.2)."""

from __future__ import annotations

from typing import Protocol

from quire.engine_core.request import Sequence
from quire.sampling_params import SamplingParams


class Verbs(Protocol):
    """What a decoding method may do. Appending is not among them yet: the worker appends what it samples."""

    def fork(self, parent: Sequence, index: int, num_total_tokens: int) -> Sequence:
        """A child that shares the parent's first num_total_tokens tokens and all blocks that they lie in."""

    def free(self, sequence: Sequence, finish_reason: str) -> None:
        """The sequence ends; its blocks go back."""


class DecodingMethod(Protocol):
    """Stateless where it can be: one object serves all requests that use it."""

    def num_sequences(self, sampling: SamplingParams) -> int:
        """How many sequences a request has at most; so many rows are set aside when it is admitted."""

    def after_token(self, sequence: Sequence, verbs: Verbs) -> bool:
        """Called once a watched sequence got a token, before stop rules. False: it need not be watched any more."""
