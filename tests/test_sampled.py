"""What of a product is in the default run."""

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.differential import conftest as daily_half
from tests.support.sampled import least_known, sampled

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


def test_what_one_choice_left_out_is_in_the_next():
    cases = [(("model", name),) for name in "abcdefg"]
    times_taken = Counter()
    first, second = (least_known(cases, 4, times_taken) for _ in range(2))
    assert len(first) == len(second) == 4
    assert first | second == set(range(7))


class Case:
    """An item of pytest, as far as it is looked at."""

    def __init__(self, test, **params):
        self.path = Path(daily_half.__file__).with_name("test_walls.py")
        self.nodeid = f"{test}[{params}]"
        self.callspec = SimpleNamespace(params=params)
        self.marks = []

    def get_closest_marker(self, name):
        return None

    def add_marker(self, mark):
        self.marks.append(mark.name)


def test_half_of_a_long_product_runs_by_day_and_every_value_of_its_parameters():
    models = "abcdefg"
    product = [Case("first", model=model, is_async=is_async) for model in models for is_async in (False, True)]
    single = [Case("second", way=way) for way in range(6)]
    short = [Case("third", number=number) for number in range(4)]
    daily_half.pytest_collection_modifyitems(SimpleNamespace(args=["tests"]), [*product, *single, *short])
    by_day = [case.callspec.params for case in product if case.marks != ["nightly"]]
    assert len(by_day) == 7
    assert {params["model"] for params in by_day} == set(models)
    assert {params["is_async"] for params in by_day} == {False, True}
    assert not any(case.marks for case in (*single, *short))


def test_cases_that_are_named_run():
    cases = [Case("first", number=number, way=way) for number in range(3) for way in range(3)]
    daily_half.pytest_collection_modifyitems(SimpleNamespace(args=[case.nodeid for case in cases]), cases)
    assert not any(case.marks for case in cases)
