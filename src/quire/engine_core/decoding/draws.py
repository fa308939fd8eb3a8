"""Which continuations of all beams are followed: the best, or some that are drawn.

Drawn ones are drawn as Transformers does with do_sample: without replacement, each in proportion to the probability of
its whole beam. A number is added to each score whose distribution makes the greatest sums just that (Gumbel); it
follows from the request's seed, the position, the beam and the token, so a request that is computed again draws the
same.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from quire.uniform_numbers import hashed, to_uint64, uniforms_of

# Of each beam the likeliest, whatever top_k is: all of a large vocabulary would hold up a step that others share.
MOST_DRAWN_FROM = 1024


class Scored(Protocol):
    @property
    def score(self) -> float: ...

    @property
    def token_id(self) -> int: ...

    @property
    def index_of_beam(self) -> int: ...


T = TypeVar("T", bound=Scored)


class NoDraws:
    def drawn(self, continuations: list[T], count: int, length: int) -> list[T]:
        return continuations


class Draws:
    """Of one request."""

    def __init__(self, seed: int) -> None:
        self._seed = np.array([to_uint64(seed)], dtype=np.uint64)

    def drawn(self, continuations: list[T], count: int, length: int) -> list[T]:
        """So many of these, in their order, for the token of this number."""
        if len(continuations) <= count:
            return continuations
        scores = np.array([one.score for one in continuations])
        keys = scores - np.log(-np.log(self._uniforms(continuations, length)))
        chosen = np.sort(np.argsort(-keys, kind="stable")[:count])
        return [continuations[place] for place in chosen.tolist()]

    def _uniforms(self, continuations: list[T], length: int) -> npt.NDArray[np.float64]:
        """Above 0 and below 1."""
        beams = np.array([one.index_of_beam for one in continuations], dtype=np.int64)
        tokens = np.array([one.token_id for one in continuations], dtype=np.int64)
        of_beams = hashed(hashed(self._seed) + (np.int64(length) << 16 | beams).astype(np.uint64))
        return np.maximum(uniforms_of(of_beams, tokens), 2.0**-50)
