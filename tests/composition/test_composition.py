"""Features together give what each gives alone, or one precise error: all pairs and many triples by night, a sample by
default (docs/composition.md)."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from tests.composition.features import ALTERNATIVES, CHUNKS, FEATURES, LOGPROBS, PP, SWAP, TP
from tests.composition.page import page, pairs
from tests.composition.refusals import REFUSALS, refusals_among
from tests.composition.runs import NUM_SCARCE, House, RefusedError, compare

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
# starting workers in processes of their own takes longest
SLOW = {TP, PP}
NUM_PAIRS = 56
NUM_TRIPLES = 12
NUM_NIGHTLY_TRIPLES = 400


def triples() -> list[frozenset[str]]:
    """Always the same."""
    possible = [
        triple
        for triple in map(frozenset, itertools.combinations(FEATURES, 3))
        if not any(pair <= triple for pair in ALTERNATIVES) and not refusals_among(triple)
    ]
    return random.Random(22).sample(possible, NUM_NIGHTLY_TRIPLES)


def cases() -> list[Any]:
    """Every feature is in the default sample, and what is refused is all there."""
    shuffled = random.Random(22).sample(pairs(), len(pairs()))
    quick = [pair for pair in shuffled if not pair & SLOW and pair not in REFUSALS][:NUM_PAIRS]
    slow = [next(pair for pair in shuffled if name in pair and pair not in REFUSALS) for name in sorted(SLOW)]
    threes = triples()
    by_day = {*quick, *slow, *REFUSALS, *[three for three in threes if not three & SLOW][:NUM_TRIPLES]}
    assert set(FEATURES) == set().union(*quick, *slow)
    return [
        pytest.param(names, id=" + ".join(sorted(names)), marks=() if names in by_day else pytest.mark.nightly)
        for names in (*pairs(), *threes)
    ]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("composition"))


@pytest.mark.parametrize("names", cases())
def test_together_as_alone(house: House, names: frozenset[str]) -> None:
    expected = refusals_among(names)
    if not expected:
        compare(house, names)
        return
    with pytest.raises(RefusedError) as caught:
        compare(house, names)
    assert any(text in str(caught.value) for text in expected), str(caught.value)


def test_the_page_says_what_these_tests_hold() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(REFUSALS), "python -m tests.composition --write docs/composition.md"


def test_a_difference_is_found(house: House) -> None:
    names = frozenset({CHUNKS, LOGPROBS})
    expected = house.plain(names)
    expected[2, 0][0].logprobs[3][1][0] += 1e-6
    with pytest.raises(AssertionError, match="request 2, turn 0, sequence 0: log-probabilities differ"):
        compare(house, names)
    expected[2, 0][0].logprobs[3][1][0] -= 1e-6
    expected[6, 0][0].tokens[-1] += 1
    with pytest.raises(AssertionError, match="request 6, turn 0"):
        compare(house, names)
    expected[6, 0][0].tokens[-1] -= 1


def test_a_run_that_does_not_show_its_feature_is_found(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NUM_SCARCE, "llama", (700, 700))
    with pytest.raises(AssertionError, match="num_preemptions_by_swap_total is 0"):
        compare(house, frozenset({SWAP}))
