"""Watermarks in sampled text: how a token is preferred by its context, and how that is found again.

A key and the last `context_width` tokens of an output give every token of the vocabulary a number in [0, 1). Of the
tokens that may be sampled, with the probabilities p, the one with the greatest log(u) / p is taken: each is taken with
its own probability, so a text reads as it would, but who has the key finds greater numbers beneath its tokens than
chance has (Aaronson's scheme, by Gumbel's maximum). Where a context occurred before in the same output, and in its
first tokens, the seed decides as always: samples of a prompt whose first tokens differ go on differently, and nothing
repeats itself for the mark's sake.

Neither model nor prompt is needed to detect it, only the tokens of the output.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config.watermark import Watermark
from quire.errors import RequestError
from quire.uniform_numbers import hashed, uniforms_of

Uniforms = npt.NDArray[np.float64]


def uniforms(watermark: Watermark, context: npt.NDArray[Any], token_ids: npt.NDArray[np.int64]) -> Uniforms:
    """The numbers of these tokens behind these last ones."""
    content = np.ascontiguousarray(context, dtype="<i4").tobytes()
    digest = hashlib.blake2b(content, key=struct.pack("<Q", watermark.key), digest_size=8).digest()
    return uniforms_of(hashed(np.frombuffer(digest, dtype="<u8")), token_ids)


@dataclass(frozen=True)
class WatermarkDetection:
    """`p_value`: how often chance alone has so great a score; tokens behind a context that occurred before do not
    count."""

    is_watermarked: bool
    p_value: float
    score: float
    num_scored_tokens: int


class WatermarkDetector:
    """Has the key of a server, and looks for its mark."""

    def __init__(self, key: int, context_width: int = 4, *, threshold: float = 0.01) -> None:
        """`threshold`: the greatest p_value that is called a watermark."""
        self._watermark = Watermark.of({"key": key, "context_width": context_width})
        self._threshold = threshold

    def detect(self, token_ids: Sequence[int]) -> WatermarkDetection:
        """Of an output's tokens, or a part of them in their order."""
        width = self._watermark.context_width
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise RequestError(
                "token_ids: must be tokens, such as output.token_ids. A text must be tokenized first.",
                param="token_ids",
            )
        tokens = tokens.astype(np.int64)
        seen: set[bytes] = set()
        score = 0.0
        for end in range(width, len(tokens)):
            context = tokens[end - width : end]
            name = context.tobytes()
            if name in seen:
                continue
            seen.add(name)
            [uniform] = uniforms(self._watermark, context, tokens[end : end + 1])
            score -= math.log1p(-uniform)
        p_value = _chance_of_sum(score, len(seen))
        return WatermarkDetection(p_value <= self._threshold, p_value, score, len(seen))


def _chance_of_sum(score: float, count: int) -> float:
    """That the sum of `count` exponential numbers is as great: e^-s times the first terms of e^s."""
    if count == 0 or score <= 0.0:
        return 1.0
    logs = [power * math.log(score) - math.lgamma(power + 1) for power in range(count)]
    greatest = max(logs)
    total = math.fsum(math.exp(value - greatest) for value in logs)
    return min(1.0, math.exp(greatest - score + math.log(total)))
