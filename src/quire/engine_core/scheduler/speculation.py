"""How many drafts each row gets (4.4.4): as many as pay, none where they lose (C29).

A draft that is accepted saves a step; one that is rejected was computed for nothing. What a step and a draft cost was
measured at start; how often drafts are accepted is counted, for each row and over all. Both are values that come in
from outside, so the same outputs lead to the same decisions. Called by the scheduler; knows rows, not requests.

    expected tokens of a step with k drafts       1 + a + a^2 + ... + a^k          a: share of accepted drafts
    its price, with n rows that sample            step(n * (1 + k)) + k * draft(n)

A proposer may also find nothing, which has its price too: that is counted like a wrong draft. And whatever answers do,
all drafts together lose at most a hundredth of the time: what they cost is paid from an account that plain steps and
right drafts fill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.messages import NUM_DRAFTS, IntArray

Floats = npt.NDArray[np.float64]

# An observation counts this much more than the sum of all earlier ones; for the share of all, less.
_WEIGHT = 0.15
_WEIGHT_OF_ALL = 0.02
# What is assumed of drafts before any was seen.
_FIRST_GUESS = 0.7
# A row whose drafts do not pay tries one again after so many tokens, then twice as many; soon, if that one is right.
_FIRST_PAUSE = 32
_LONGEST_PAUSE = 512
_SHORT_PAUSE = 8
# Such tries come in one step of so many: a pass of the proposer costs nearly the same for one row as for all.
_STEPS_BETWEEN_TRIES = 8
# Where drafts pay for nobody, one new sequence of so many tries at once, the others after a pause.
_SEQUENCES_BETWEEN_TRIES = 16
# What is found, or not, counts so much: it changes with the text.
_WEIGHT_OF_FOUND = 0.3
# The account gets this part of the time of plain steps; it begins with the time of some, and holds that of some more.
_ALLOWANCE = 0.01
_FIRST_STEPS = 2
_MOST_STEPS = 8
# Drafts must promise this much more than a plain step: estimates are noisy, and switching costs.
_MARGIN = 1.02


@dataclass(frozen=True)
class SpeculationCosts:
    """Seconds: a step of the model, one pass of the proposer, and what drafts add to a step besides, however few, and
    for each row that is asked for some."""

    seconds_per_step: float = 1.0
    seconds_per_token: float = 0.0
    seconds_per_draft_step: float = 0.0
    seconds_per_draft_token: float = 0.0
    seconds_of_drafting: float = 0.0
    seconds_per_asked_row: float = 0.0

    def plain(self, num_rows: int) -> float:
        return self.seconds_per_step + self.seconds_per_token * num_rows

    def with_drafts(self, num_rows: int, num_drafts: int) -> float:
        besides = self.seconds_of_drafting + self.seconds_per_asked_row * num_rows if num_drafts else 0.0
        proposing = besides + num_drafts * (self.seconds_per_draft_step + self.seconds_per_draft_token * num_rows)
        return self.plain(num_rows * (1 + num_drafts)) + proposing


class Speculation(Protocol):
    """What the scheduler asks."""

    @property
    def lookahead(self) -> int:
        """Slots beyond the granted tokens that proposing writes into."""

    def num_drafts(self, rows: IntArray, totals: IntArray) -> IntArray | int:
        """How many tokens to propose for each of these rows, which have so many tokens."""

    def step_data(self, growth: IntArray) -> dict[str, Any]:
        """What the worker must hear: how many drafts for each row, whose total grew by one more."""

    def observe(self, speculated: IntArray) -> None:
        """What became of the drafts of a step: StepOutput.speculated."""

    def reset(self, row: int) -> None:
        """Another sequence has the row."""

    def counts(self, row: int) -> tuple[int, int]:
        """(drafts, accepted ones) of the sequence in that row."""

    def statistics(self) -> dict[str, float]: ...


class NoSpeculation:
    """A token a step."""

    lookahead = 0

    def num_drafts(self, rows: IntArray, totals: IntArray) -> IntArray | int:
        return 0

    def step_data(self, growth: IntArray) -> dict[str, Any]:
        return {}

    def observe(self, speculated: IntArray) -> None:
        """There is nothing to see."""

    def reset(self, row: int) -> None:
        """Nothing is kept."""

    def counts(self, row: int) -> tuple[int, int]:
        return 0, 0

    def statistics(self) -> dict[str, float]:
        return {}


class AdaptiveSpeculation:
    """Chooses 0 ... most drafts by what they bring. Where they bring nothing, it tries again from time to time."""

    def __init__(self, num_rows: int, most: int, lookahead: int, costs: SpeculationCosts) -> None:
        self.lookahead = lookahead
        self._most = most
        self._costs = costs
        # of the drafts that were looked at, up to the first wrong one: how many were right
        self._share = _FIRST_GUESS
        self._share_by_row = np.full(num_rows, _FIRST_GUESS)
        # of the times that drafts were asked for: how often there were some
        self._found = 1.0
        self._found_by_row = np.ones(num_rows)
        # seconds that drafts may lose, and the time that a token took in the step that was decided last
        self._account = _FIRST_STEPS * costs.plain(1)
        self._seconds_per_row = costs.plain(1)
        self._resume_at = np.zeros(num_rows, dtype=np.int64)
        self._pause = np.full(num_rows, _FIRST_PAUSE, dtype=np.int64)
        self._begins_with_pause = np.zeros(num_rows, dtype=np.bool_)
        # by number of rows: the best number of drafts for each share, in percent
        self._best: dict[int, IntArray] = {}
        self._best_now = self._best_by_percent(1)
        self._num_steps = 0
        self._num_sequences = 0
        self._num_drafted_by_row = np.zeros(num_rows, dtype=np.int64)
        self._num_accepted_by_row = np.zeros(num_rows, dtype=np.int64)
        self._num_drafted = 0
        self._num_accepted = 0
        self._num_pauses = 0

    def num_drafts(self, rows: IntArray, totals: IntArray) -> IntArray | int:
        self._num_steps += 1
        seconds = self._costs.plain(len(rows))
        self._seconds_per_row = seconds / max(1, len(rows))
        self._account = min(self._account + _ALLOWANCE * seconds, _MOST_STEPS * seconds)
        self._best_now = self._best_by_percent(len(rows))
        if not self._best_now[-1]:
            return 0  # with so many rows even drafts that are always right would lose
        is_beginning = self._begins_with_pause[rows]
        if np.count_nonzero(is_beginning):  # counted, which takes a fraction of what `any` does with so few
            beginners = rows[is_beginning]
            self._resume_at[beginners] = totals[is_beginning] + self._pause[beginners]
            self._begins_with_pause[beginners] = False
        is_due = totals >= self._resume_at[rows]
        if not np.count_nonzero(is_due):
            return 0
        counts = self._best_for(self._share_by_row[rows])
        if self._num_steps % _STEPS_BETWEEN_TRIES == 0:
            return self._paid_for(np.maximum(counts, 1) * is_due, rows)
        counts = counts * is_due
        return self._paid_for(counts, rows) if counts.any() and self._pays_for_all(counts, rows) else 0

    def _pays_for_all(self, counts: IntArray, rows: IntArray) -> bool:
        """A pass of the proposer has its price also where only a few rows want drafts."""
        found = self._found_by_row[rows]
        price = self._passes(counts) + self._costs.seconds_per_token * float((found * counts).sum())
        extra_tokens = float((found * _more_tokens(self._share_by_row[rows], counts)).sum())
        return extra_tokens * self._seconds_per_row > _MARGIN * price

    def _passes(self, counts: IntArray) -> float:
        """What proposing so many drafts takes."""
        costs = self._costs
        passes = costs.seconds_per_draft_step * int(counts.max(initial=0))
        passes += costs.seconds_per_draft_token * int(counts.sum())
        return costs.seconds_of_drafting + costs.seconds_per_asked_row * np.count_nonzero(counts) + passes

    def _paid_for(self, counts: IntArray, rows: IntArray) -> IntArray:
        """What the account has enough for: those whose drafts are right most often go first."""
        costs = self._costs
        price = self._passes(counts) + costs.seconds_per_token * int(counts.sum())
        if price <= self._account:
            return counts
        once = costs.seconds_of_drafting + costs.seconds_per_draft_step * int(counts.max(initial=0))
        order = np.argsort(-self._share_by_row[rows] * (counts > 0), kind="stable")
        per_token = costs.seconds_per_token + costs.seconds_per_draft_token
        prices = once + (per_token * counts[order] + costs.seconds_per_asked_row * (counts[order] > 0)).cumsum()
        paid = np.zeros_like(counts)
        paid[order] = counts[order] * (prices <= self._account)
        return paid

    def step_data(self, growth: IntArray) -> dict[str, Any]:
        num_drafts = np.maximum(growth - 1, 0)
        if not num_drafts.any():
            return {}
        self._account -= self._passes(num_drafts)
        return {NUM_DRAFTS: num_drafts}

    def observe(self, speculated: IntArray) -> None:
        self._learn_what_was_found(speculated)
        rows, _, totals, verified, accepted = speculated
        is_seen = verified > 0
        rows = rows[is_seen]
        totals = totals[is_seen]
        verified = verified[is_seen]
        accepted = accepted[is_seen]
        if not len(rows):
            return
        self._account += int(accepted.sum()) * self._seconds_per_row
        self._account -= int(verified.sum()) * self._costs.seconds_per_token
        self._num_drafted += int(verified.sum())
        self._num_accepted += int(accepted.sum())
        self._num_drafted_by_row[rows] += verified
        self._num_accepted_by_row[rows] += accepted
        # Of the drafts behind a rejected one nothing is learned.
        tried = np.minimum(accepted + 1, verified)
        keep = (1 - _WEIGHT) ** tried
        shares = self._share_by_row[rows] * keep + accepted / tried * (1 - keep)
        self._share_by_row[rows] = shares
        keep_all = (1 - _WEIGHT_OF_ALL) ** int(tried.sum())
        self._share = self._share * keep_all + float(accepted.sum() / tried.sum()) * (1 - keep_all)
        is_losing = self._best_for(shares) == 0
        self._pause[rows[~is_losing]] = _FIRST_PAUSE
        if is_losing.any():
            self._give_up(rows[is_losing], totals[is_losing], (accepted == verified)[is_losing])

    def _learn_what_was_found(self, speculated: IntArray) -> None:
        """Behind a row's last token stands what was proposed; one that had no drafts was asked for some."""
        rows, computed, totals, verified, _ = speculated
        is_found = totals - computed > 1
        is_known = is_found | (verified == 0)
        if not is_known.any():
            return
        rows = rows[is_known]
        is_found = is_found[is_known]
        self._found_by_row[rows] += _WEIGHT_OF_FOUND * (is_found - self._found_by_row[rows])
        self._found += (1 - (1 - _WEIGHT_OF_ALL) ** len(rows)) * (float(is_found.mean()) - self._found)
        in_vain = rows[~is_found]
        is_losing = ~self._are_worth_asking(self._share_by_row[in_vain], self._found_by_row[in_vain])
        if is_losing.any():
            self._give_up(in_vain[is_losing], totals[is_known][~is_found][is_losing], np.zeros(1, dtype=np.bool_))

    def _are_worth_asking(self, shares: Floats, found: Floats) -> npt.NDArray[np.bool_]:
        """Whether what drafts bring, as often as there are some, pays for asking; alone, if need be."""
        counts = self._best_for(shares)
        price = self._passes(np.ones(1, dtype=np.int64)) + found * counts * self._costs.seconds_per_token
        gain = found * _more_tokens(shares, counts) * self._seconds_per_row
        are_worth: npt.NDArray[np.bool_] = (counts > 0) & (gain >= _MARGIN * price)
        return are_worth

    def _give_up(self, rows: IntArray, totals: IntArray, was_right: npt.NDArray[np.bool_]) -> None:
        self._num_pauses += len(rows)
        pauses = self._pause[rows]
        self._resume_at[rows] = totals + np.where(was_right, _SHORT_PAUSE, pauses)
        self._pause[rows] = np.where(was_right, pauses, np.minimum(2 * pauses, _LONGEST_PAUSE))

    def reset(self, row: int) -> None:
        """A new sequence starts from what all of them have shown."""
        self._share_by_row[row] = self._share
        self._found_by_row[row] = self._found
        self._resume_at[row] = 0
        self._pause[row] = _FIRST_PAUSE
        is_losing = not self._are_worth_asking(np.array([self._share]), np.array([self._found]))[0]
        self._num_sequences += 1
        self._begins_with_pause[row] = is_losing and self._num_sequences % _SEQUENCES_BETWEEN_TRIES != 0
        self._num_drafted_by_row[row] = self._num_accepted_by_row[row] = 0

    def counts(self, row: int) -> tuple[int, int]:
        return int(self._num_drafted_by_row[row]), int(self._num_accepted_by_row[row])

    def statistics(self) -> dict[str, float]:
        return {
            "num_draft_tokens_total": self._num_drafted,
            "num_accepted_draft_tokens_total": self._num_accepted,
            "num_speculation_pauses_total": self._num_pauses,
        }

    def _best_for(self, shares: Floats) -> IntArray:
        best: IntArray = self._best_now[(shares * 100).astype(np.int64)]
        return best

    def _best_by_percent(self, num_rows: int) -> IntArray:
        """The best number of drafts for each share of accepted ones, 0 to 100 %, with so many rows."""
        # in steps of a fifth: prices change little, and this need not be worked out for every number of rows
        size = int(1.2 ** int(np.log(max(1, num_rows)) / np.log(1.2)))
        if size not in self._best:
            counts = np.arange(self._most + 1)
            shares = np.arange(101)[:, None] / 100
            tokens = (shares**counts).cumsum(axis=1)
            prices = np.array([self._costs.with_drafts(size, int(count)) for count in counts])
            rates = tokens / prices
            best = rates.argmax(axis=1)
            pays = rates.max(axis=1) > _MARGIN * rates[:, 0]
            self._best[size] = np.where(pays, best, 0)
        return self._best[size]


def _more_tokens(shares: Floats, counts: IntArray) -> Floats:
    """That so many drafts are expected to bring: a + a^2 + ... + a^k."""
    sure = np.minimum(shares, 0.999)
    more: Floats = sure * (1 - sure**counts) / (1 - sure)
    return more
