"""How many drafts are asked for: they speed up where they pay, and cost next to nothing where they do not (C29)."""

from __future__ import annotations

import numpy as np
import pytest

from quire.engine_core.scheduler.speculation import AdaptiveSpeculation, SpeculationCosts
from quire.messages import int_array

# seconds: a small model on a CPU, and one of 8 billion parameters with a draft of 1 billion on a GPU
SMALL = SpeculationCosts(1e-3, 2e-5, 2e-4, 1e-6)
LARGE = SpeculationCosts(8e-3, 4e-5, 1e-3, 3e-6)
# nothing to run, but tokens are dear to verify
LOOK_UP = SpeculationCosts(1e-3, 2e-4, 0.0, 5e-6)


class Text:
    """What becomes of drafts: each is right with this probability, and there are some with that one."""

    def __init__(self, acceptance: float, found: float = 1.0) -> None:
        self._acceptance = acceptance
        self._found = found
        self._random = np.random.default_rng(0)

    def num_found(self, num_tokens: int, num_asked: int) -> int:
        return num_asked if num_asked and self._random.random() < self._found else 0

    def num_right(self, num_tokens: int, num_drafts: int) -> int:
        return next((i for i in range(num_drafts) if self._random.random() >= self._acceptance), num_drafts)


class Trap(Text):
    """All drafts are right for so many tokens, then none, and so on."""

    def __init__(self, period: int) -> None:
        super().__init__(1.0)
        self._period = period

    def num_right(self, num_tokens: int, num_drafts: int) -> int:
        return 0 if num_tokens // self._period % 2 else num_drafts


def speed_of(
    costs: SpeculationCosts, num_rows: int, text: Text, num_steps: int = 400, most: int = 4, length: int = 0
) -> float:
    """Tokens a second, with drafts against without. Sequences end after `length` tokens, or never."""
    speculation = AdaptiveSpeculation(256, most, most, costs)
    rows, totals = np.arange(num_rows), np.full(num_rows, 50)
    for row in rows.tolist():
        speculation.reset(row)
    seconds, num_tokens = 0.0, 0
    for _ in range(num_steps):
        asked = np.broadcast_to(int_array(speculation.num_drafts(rows, totals)), (num_rows,)).copy()
        has = asked > 0
        speculation.step_data(asked + 1)
        found = int_array([text.num_found(*pair) for pair in zip(totals.tolist(), asked.tolist(), strict=True)])
        accepted = int_array([text.num_right(*pair) for pair in zip(totals.tolist(), found.tolist(), strict=True)])
        passes = sum(
            costs.seconds_per_draft_step + costs.seconds_per_draft_token * int((asked > i).sum())
            for i in range(int(asked.max()))
        )
        seconds += costs.plain(num_rows + int(found.sum())) + passes + costs.seconds_per_asked_row * int(has.sum())
        seconds += costs.seconds_of_drafting * bool(has.any())
        num_tokens += int((accepted + 1).sum())
        totals = totals + accepted + 1
        if has.any():
            speculation.observe(np.stack([rows, totals - 1, totals + found, found, accepted])[:, has])
        for row in np.flatnonzero(totals - 50 >= length).tolist() if length else ():
            speculation.reset(row)
            totals[row] = 50
    return num_tokens / seconds / (num_rows / costs.plain(num_rows))


def speed_against_plain(
    costs: SpeculationCosts, num_rows: int, acceptance: float, num_steps: int = 400, most: int = 4, length: int = 0
) -> float:
    return speed_of(costs, num_rows, Text(acceptance), num_steps, most, length)


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("num_rows", [1, 16, 64, 128])
@pytest.mark.parametrize("costs", [SMALL, LARGE, LOOK_UP], ids=["small", "large", "look-up"])
def test_it_never_loses_much(costs: SpeculationCosts, num_rows: int, acceptance: float) -> None:
    assert speed_against_plain(costs, num_rows, acceptance) > 0.98


@pytest.mark.parametrize("num_rows", [1, 8])
def test_short_answers_do_not_all_try(num_rows: int) -> None:
    assert speed_against_plain(SMALL, num_rows, 0.0, num_steps=1200, length=20) > 0.98


# the same as measured with n-grams: what asking costs is small or large beside a step, and so is a token
NGRAM = {
    "2 ms": SpeculationCosts(1.8e-3, 4e-5, seconds_of_drafting=0.25e-3, seconds_per_asked_row=2e-5),
    "30 ms": SpeculationCosts(28e-3, 2e-3, seconds_of_drafting=0.25e-3, seconds_per_asked_row=2e-5),
    "8 ms, many at once": SpeculationCosts(8e-3, 4e-5, seconds_of_drafting=0.25e-3, seconds_per_asked_row=2e-5),
}
TEXTS = {
    "never right": lambda: Text(0.0),
    "right now and then": lambda: Text(0.4),
    "mostly right": lambda: Text(0.7),
    "nothing repeats": lambda: Text(1.0, found=0.0),
    "little repeats, and differently": lambda: Text(0.0, found=0.1),
    "half repeats": lambda: Text(0.3, found=0.5),
    **{f"a trap of {period}": lambda period=period: Trap(period) for period in (8, 16, 32, 64)},
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("costs", NGRAM)
def test_no_text_makes_look_ups_lose(costs: str, num_rows: int, text: str) -> None:
    assert speed_of(NGRAM[costs], num_rows, TEXTS[text](), num_steps=600, most=8) > 0.98


@pytest.mark.parametrize(("num_rows", "least"), [(1, 4.0), (8, 2.0)])
def test_what_repeats_is_found_again(num_rows: int, least: float) -> None:
    assert speed_of(NGRAM["2 ms"], num_rows, Text(0.95), num_steps=600, most=8) > least


def test_one_who_finds_nothing_is_asked_less_and_less_and_does_not_stop_the_others() -> None:
    """Row 0 repeats itself, row 1 never."""
    speculation, rows, totals = AdaptiveSpeculation(2, 8, 0, NGRAM["2 ms"]), int_array([0, 1]), int_array([10, 10])
    asked = np.zeros((2, 400), dtype=np.int64)
    for step in range(400):
        counts = asked[:, step] = np.broadcast_to(speculation.num_drafts(rows, totals), (2,))
        found = counts * (rows == 0)
        totals = totals + found + 1
        if counts.any():
            speculation.step_data(counts + 1)
            speculation.observe(np.stack([rows, totals - 1, totals + found, found, found])[:, counts > 0])
    assert (asked[0, 50:] > 4).mean() > 0.9
    assert (asked[1, 50:] > 0).sum() < 15


@pytest.mark.parametrize(
    ("costs", "num_rows", "acceptance", "least"), [(SMALL, 1, 0.8, 1.7), (LARGE, 1, 0.7, 1.6), (LARGE, 16, 0.8, 1.5)]
)
def test_it_speeds_up_where_drafts_are_good(
    costs: SpeculationCosts, num_rows: int, acceptance: float, least: float
) -> None:
    assert speed_against_plain(costs, num_rows, acceptance) > least


def test_it_comes_back_when_drafts_become_good() -> None:
    speculation, rows, totals = AdaptiveSpeculation(4, 4, 0, SMALL), int_array([0]), int_array([10])
    asked: list[int] = []
    for step in range(900):
        count = int(np.broadcast_to(speculation.num_drafts(rows, totals), (1,))[0])
        accepted = count if step > 300 else 0
        asked.append(count)
        totals = totals + accepted + 1
        if count:
            speculation.observe(np.stack([rows, totals - 1, totals + count, int_array([count]), int_array([accepted])]))
    assert sum(asked[250:300]) <= 2, "given up"
    assert min(asked[-50:]) >= 2, "and taken up again"


def test_counts_belong_to_the_sequence() -> None:
    speculation = AdaptiveSpeculation(2, 4, 0, SMALL)
    speculation.observe(int_array([[0, 1], [9, 9], [12, 10], [4, 4], [3, 0]]))
    assert (speculation.counts(0), speculation.counts(1)) == ((4, 3), (4, 0))
    speculation.reset(0)
    assert (speculation.counts(0), speculation.counts(1)) == ((0, 0), (4, 0))
    assert speculation.statistics()["num_draft_tokens_total"] == 8
