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


def speed_against_plain(
    costs: SpeculationCosts, num_rows: int, acceptance: float, num_steps: int = 400, most: int = 4, length: int = 0
) -> float:
    """Tokens a second, with drafts against without. Sequences end after `length` tokens, or never."""
    speculation, random = AdaptiveSpeculation(256, most, most, costs), np.random.default_rng(0)
    rows, totals = np.arange(num_rows), np.full(num_rows, 50)
    for row in rows.tolist():
        speculation.reset(row)
    seconds, num_tokens = 0.0, 0
    for _ in range(num_steps):
        asked = np.broadcast_to(int_array(speculation.num_drafts(rows, totals)), (num_rows,)).copy()
        accepted = int_array([next((i for i in range(k) if random.random() >= acceptance), k) for k in asked.tolist()])
        passes = sum(
            costs.seconds_per_draft_step + costs.seconds_per_draft_token * int((asked > i).sum())
            for i in range(int(asked.max()))
        )
        seconds += costs.plain(num_rows + int(asked.sum())) + passes
        num_tokens += int((accepted + 1).sum())
        totals = totals + accepted + 1
        has = asked > 0
        if has.any():
            speculation.observe(np.stack([rows, totals, totals, asked, accepted])[:, has])
        for row in np.flatnonzero(totals - 50 >= length).tolist() if length else ():
            speculation.reset(row)
            totals[row] = 50
    return num_tokens / seconds / (num_rows / costs.plain(num_rows))


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("num_rows", [1, 16, 64, 128])
@pytest.mark.parametrize("costs", [SMALL, LARGE, LOOK_UP], ids=["small", "large", "look-up"])
def test_it_never_loses_much(costs: SpeculationCosts, num_rows: int, acceptance: float) -> None:
    assert speed_against_plain(costs, num_rows, acceptance) > 0.96


@pytest.mark.parametrize("num_rows", [1, 8])
def test_short_answers_do_not_all_try(num_rows: int) -> None:
    assert speed_against_plain(SMALL, num_rows, 0.0, num_steps=1200, length=20) > 0.96


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
            speculation.observe(np.stack([rows, totals, totals, int_array([count]), int_array([accepted])]))
    assert sum(asked[250:300]) <= 2, "given up"
    assert min(asked[-50:]) >= 2, "and taken up again"


def test_counts_belong_to_the_sequence() -> None:
    speculation = AdaptiveSpeculation(2, 4, 0, SMALL)
    speculation.observe(int_array([[0, 1], [9, 9], [12, 10], [4, 4], [3, 0]]))
    assert (speculation.counts(0), speculation.counts(1)) == ((4, 3), (4, 0))
    speculation.reset(0)
    assert (speculation.counts(0), speculation.counts(1)) == ((0, 0), (4, 0))
    assert speculation.statistics()["num_draft_tokens_total"] == 8
