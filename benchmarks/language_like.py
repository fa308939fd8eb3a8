"""A simulated executor whose candidates look like a language model's. Used by sharing.py."""

from __future__ import annotations

import math

import numpy as np
from traces import solve

from quire.messages import Candidates, IntArray
from quire.testing.core import FULL
from quire.testing.simulator.checking_model import Floats, Hashes
from quire.testing.simulator.executor import SimulatedExecutor

VOCAB = 256


class LanguageLike:
    """A distribution for each prefix, by its hash: softmax(sharpness * noise), where sharpness too is the prefix's own.

    Most prefixes have one or a few tokens that stand out, some have hardly any. Noise and sharpness are exponentially
    distributed; the mean sharpness follows from the one parameter, perplexity = exp(mean entropy).
    """

    def __init__(self, perplexity: float) -> None:
        prefixes = np.arange(1, 4001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

        def certainty(sharpness: float) -> float:
            logprobs = _log_probabilities(prefixes, sharpness)
            return float((np.exp(logprobs) * logprobs).sum(axis=1).mean())

        self.sharpness = solve(certainty, -math.log(perplexity), 100_000.0)

    def __call__(self, hashes: Hashes) -> Floats:
        return _log_probabilities(hashes, self.sharpness)


def _log_probabilities(hashes: Hashes, mean_sharpness: float) -> Floats:
    tokens = np.arange(1, VOCAB + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    sharpness = -np.log(_uniform(hashes)) * mean_sharpness
    logits = -np.log(_uniform(hashes[:, None] ^ tokens)) * sharpness[:, None]
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def _uniform(hashes: Hashes) -> Floats:
    """Between 0 and 1, neither included."""
    mixed = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) / 2.0**53 + 2.0**-54)


class LanguageLikeExecutor(SimulatedExecutor):
    """Checks every slot that is read, as its parent does, and answers with other probabilities."""

    def __init__(self, num_blocks: int, block_size: int, model: LanguageLike) -> None:
        super().__init__([FULL], num_blocks, block_size, VOCAB)
        self._model = model

    def _candidates(self, rows: IntArray) -> dict[int, Candidates]:
        state = self.rows
        logprobs = self._model(state.last_hashes(rows))
        most = int(state.num_candidates[rows].max())
        nearly = np.argpartition(-logprobs, most, axis=1)[:, :most]
        order = np.argsort(-np.take_along_axis(logprobs, nearly, axis=1), axis=1, kind="stable")
        best = np.take_along_axis(nearly, order, axis=1)
        values = np.take_along_axis(logprobs, best, axis=1)
        return {
            row: Candidates(token_ids, found)
            for row, token_ids, found in zip(rows.tolist(), best.tolist(), values.tolist(), strict=True)
        }
