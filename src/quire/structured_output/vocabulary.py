"""The tokens of a model as bytes, in a form that crosses a socket; and llguidance's tokenizer made of them.

Made by the front from its renderer, so that every kind of tokenizer that can be read serves here too, and the worker
reads no files for it. Sent once, with the first request that asks for a form.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np


class Vocabulary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`data` holds the bytes of all tokens one after the other, `lengths` their lengths as int32."""

    data: bytes
    lengths: bytes
    # tokens that are no text, but may be named in a grammar
    special_ids: list[int]
    # tokens that end an output
    end_ids: list[int]

    @classmethod
    def of(cls, tokens: Sequence[bytes], special_ids: Collection[int], end_ids: Collection[int]) -> Vocabulary:
        """One entry for each row of the model's logits; a token without bytes is never chosen."""
        size = len(tokens)
        ends = sorted({token for token in end_ids if token < size})
        special = sorted({token for token in (*special_ids, *ends) if token < size})
        lengths = np.array([len(token) for token in tokens], dtype=np.int32)
        return cls(b"".join(tokens), lengths.tobytes(), special, ends)

    @property
    def size(self) -> int:
        return len(self.lengths) // 4

    def tokens(self) -> list[bytes]:
        """The bytes of each token."""
        ends = np.frombuffer(self.lengths, dtype=np.int32).cumsum(dtype=np.int64).tolist()
        return [self.data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def tokenizer(self) -> Any:
        """An LLTokenizer: takes half a second for 150,000 tokens."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self)), eos_token=self.end_ids)


class _Tokens:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens()
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        """Text to tokens: is not asked for, because no grammar forces tokens (`grammar.matcher_of`)."""
        return []
