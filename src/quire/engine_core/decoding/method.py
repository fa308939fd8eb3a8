"""What a decoding method is: an object that sees tokens of watched sequences and answers with three verbs (3.5.2)."""

from __future__ import annotations

from typing import Protocol

from quire.engine_core.request import Sequence


class Verbs(Protocol):
    """What a decoding method may do. The scheduler is the one who does it."""

    def fork(self, parent: Sequence, index: int, num_total_tokens: int) -> Sequence:
        """A child that shares the parent's first num_total_tokens tokens and all blocks that they lie in."""

    def append(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Tokens that the method chose itself."""

    def free(self, sequence: Sequence, finish_reason: str) -> None:
        """The sequence ends; its blocks go back."""


class DecodingMethod(Protocol):
    """Stateless where it can be: one object serves all requests that use it."""

    def after_token(self, sequence: Sequence, verbs: Verbs) -> bool:
        """Called once a watched sequence got a token, before stop rules. False: it need not be watched any more."""
