"""What of a product is in the default run."""

import itertools

import pytest
from tests.support.sampled import sampled

FACTORS = ("abcdefg", range(4), (True, False))


def by_day(n):
    return [case.values for case in sampled(*FACTORS, n=n) if not case.marks]


@pytest.mark.parametrize("n", range(7, 57))
def test_every_value_is_in_the_sample_and_no_combination_is_lost(n):
    cases = sampled(*FACTORS, n=n)
    assert [case.values for case in cases] == list(itertools.product(*FACTORS))
    assert {mark.name for case in cases for mark in case.marks} <= {"nightly"}
    assert len(by_day(n)) == n
    for number, factor in enumerate(FACTORS):
        assert {values[number] for values in by_day(n)} == set(factor)


def test_a_sample_of_the_size_of_the_two_largest_factors_has_every_pair():
    pairs = {
        (i, j, *pair)
        for i, j in itertools.combinations(range(3), 2)
        for pair in itertools.product(FACTORS[i], FACTORS[j])
    }
    assert {
        (i, j, values[i], values[j]) for values in by_day(28) for i, j in itertools.combinations(range(3), 2)
    } == pairs


def test_a_sample_without_room_for_every_value_is_refused():
    with pytest.raises(ValueError, match="n=6: a factor has 7 values"):
        sampled(*FACTORS, n=6)
