"""Drafts of the simulated worker: proposed, verified and truncated as a worker does it, by columns.

The proposer knows the checking model and is wrong on purpose. What it proposes is a function of the prefix and of
`SimulatedDrafts`, so that runs repeat. A draft is verified by equal draws: it stays where it is the very token that
the model says at that position, so the tokens of a sequence are the same with drafts and without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.messages import IntArray
from quire.testing.simulator.checking_model import Floats, Hashes, extended, next_tokens
from quire.testing.simulator.rows import SimulatedRows

_PRIME = np.uint64(0x100000001B3)
_OF_COUNT, _OF_TOKEN = np.uint64(0xA5A5_5A5A_0F0F_F0F0), np.uint64(0x3C3C_C3C3_9696_6969)
_PARTS = 1 << 16


@dataclass(frozen=True)
class SimulatedDrafts:
    """A proposer: the share of its tokens that are right, and of the steps in which it has fewer than were asked for.

    With `has_cache` it keeps a cache of its own in the blocks of the sequence, as a draft model does: what a row
    proposes it also writes, into slots behind the tokens that were granted.
    """

    acceptance: float = 0.8
    shortfall: float = 0.15
    has_cache: bool = False


class Verified(NamedTuple):
    """By row of a step: drafts that were looked at and accepted, whether the row samples, and what it emits."""

    num_looked_at: IntArray
    num_accepted: IntArray
    samples: npt.NDArray[np.bool_]
    num_emitted: IntArray
    # all rows' tokens, one after the other
    token_ids: IntArray


def verify(state: SimulatedRows, rows: IntArray, may_sample: npt.NDArray[np.bool_], vocab_size: int) -> Verified:
    """Holds the drafts of these rows against the model, as far as they were computed, and cuts off the wrong ones.

    Afterwards a row that samples has its own token at its end and no draft; the drafts of the others that nobody has
    looked at yet stay.
    """
    pending, totals, ends = state.num_drafts[rows], state.num_total[rows], state.num_computed[rows]
    firsts = totals - pending
    num_looked_at = np.maximum(np.minimum(totals - 1, ends) - firsts + 1, 0) * may_sample
    most = max(num_looked_at.tolist())
    state.reserve_tokens(max(totals.tolist()) + most + 2)
    column = rows[:, None]
    positions = firsts[:, None] + np.arange(most + 1)
    prefixes = state.hashes[column, positions]
    token_ids = next_tokens(prefixes, state.seeds[column], state.is_greedy[column], vocab_size)
    num_accepted = np.zeros_like(rows)
    if most:
        is_right = extended(prefixes[:, :-1], token_ids[:, :-1]) == state.hashes[column, positions[:, 1:]]
        is_right &= np.arange(most) < num_looked_at[:, None]
        num_accepted = np.cumprod(is_right, axis=1, dtype=np.int64).sum(axis=1)
    samples = ((num_accepted < num_looked_at) | (ends == totals)) & may_sample
    num_emitted = num_accepted + samples

    own = rows[samples]
    lengths = (firsts + num_accepted)[samples]
    state.num_drafts[rows] = np.where(samples, 0, pending - num_accepted)
    state.num_total[own] = lengths
    state.num_computed[own] = lengths
    if len(own):
        state.append(own, token_ids[samples, num_accepted[samples]])
    is_emitted = np.arange(most + 1) < num_emitted[:, None]
    return Verified(num_looked_at, num_accepted, samples, num_emitted, token_ids[is_emitted])


def propose(
    state: SimulatedRows, rows: IntArray, asked: IntArray, settings: SimulatedDrafts, vocab_size: int
) -> IntArray:
    """Appends up to so many drafts to each row; returns how many."""
    assert not np.count_nonzero(state.num_drafts[rows]), "a row that samples has drafts left"
    hashes, totals = state.last_hashes(rows), state.num_total[rows]
    luck = _shares(hashes, _OF_COUNT)
    is_short = luck < settings.shortfall
    counts = np.where(is_short, (asked * (luck / max(settings.shortfall, 1e-9))).astype(np.int64), asked)
    most = max(counts.tolist())
    state.reserve_tokens(max(totals.tolist()) + most + 2)
    seeds, is_greedy = state.seeds[rows], state.is_greedy[rows]
    for ahead in range(most):
        token_ids = next_tokens(hashes, seeds, is_greedy, vocab_size)
        is_wrong = _shares(hashes, _OF_TOKEN) >= settings.acceptance
        hashes = extended(hashes, (token_ids + is_wrong) % vocab_size)
        is_proposed = counts > ahead
        state.hashes[rows[is_proposed], totals[is_proposed] + 1 + ahead] = hashes[is_proposed]
    state.num_total[rows] += counts
    state.num_drafts[rows] = counts
    return counts


def _shares(hashes: Hashes, purpose: np.uint64) -> Floats:
    """A number in [0, 1) for each prefix."""
    mixed = (hashes ^ purpose) * _PRIME
    shares: Floats = ((mixed >> np.uint64(29)) % np.uint64(_PARTS)).astype(np.float64) / _PARTS
    return shares
