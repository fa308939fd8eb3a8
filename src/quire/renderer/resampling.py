"""A sound of another rate, piece by piece: each new sample is a weighted sum of those around its moment."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# zero crossings of the weights to each side, and the part of the frequencies that both rates have which is kept whole
_CROSSINGS = 16
_KEPT = 0.95


class Resampler:
    """From `rate` to `new_rate` samples a second. Give it pieces of about a second."""

    def __init__(self, rate: int, new_rate: int) -> None:
        divisor = math.gcd(rate, new_rate)
        self._up = new_rate // divisor
        self._down = rate // divisor
        width = _KEPT * min(1.0, new_rate / rate)
        # samples to each side that count
        self._half = math.ceil(_CROSSINGS / width)
        distance = np.arange(1 - self._half, self._half + 1) - np.arange(self._up)[:, None] / self._up
        weights = np.sinc(width * distance) * np.cos(np.pi / 2 * np.clip(distance / self._half, -1, 1)) ** 2
        # a row for each place between two samples
        self._weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
        # what later samples need of those before, silence at first; its first sample has the number 1 - half
        self._tail: Floats = np.zeros(self._half - 1, dtype=np.float32)
        self._tail_start = 1 - self._half
        self._num_made = 0

    def feed(self, samples: Floats) -> Floats:
        """The new samples whose neighbours are all there by now."""
        known = np.concatenate([self._tail, samples])
        end = self._tail_start + len(known)
        # sample n stands at n * down / up, and needs `half` behind it
        num_ready = max(self._num_made, -(-(end - self._half) * self._up // self._down))
        place = np.arange(self._num_made, num_ready) * self._down
        first = place // self._up + 1 - self._half - self._tail_start
        made: Floats = np.empty(0, dtype=np.float32)
        if len(place):
            around = np.lib.stride_tricks.sliding_window_view(known, 2 * self._half)[first]
            made = np.einsum("nk,nk->n", around, self._weights[place % self._up])
        self._num_made = num_ready
        next_start = num_ready * self._down // self._up + 1 - self._half
        self._tail = known[max(0, next_start - self._tail_start) :]
        self._tail_start = max(self._tail_start, next_start)
        return made

    def finish(self, num_samples: int) -> Floats:
        """The rest of a sound that had so many samples: behind its end it is silent."""
        made = self.feed(np.zeros(2 * self._half, dtype=np.float32))
        most = -(-num_samples * self._up // self._down)
        return made[: max(0, len(made) - (self._num_made - most))]
