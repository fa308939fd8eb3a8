"""A product of parameters of which a sample runs by default and the rest by night."""

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest


def sampled(*factors: Iterable[object], n: int) -> list[object]:
    """All combinations, for `parametrize`: `n` of them run by default, always the same; the others are for the night.

    Every value of every factor is in the sample, and of the pairs of values as many as fit. Pytest makes an `indirect`
    fixture anew for each case: what costs something is kept by name in a wider one.
    """
    values = [list(factor) for factor in factors]
    cases = list(itertools.product(*(range(len(of_factor)) for of_factor in values)))
    if n < max(map(len, values)):
        raise ValueError(f"n={n}: a factor has {max(map(len, values))} values, each of which must be run")
    times_taken: Counter[tuple[tuple[int, int], ...]] = Counter()

    def parts(case: tuple[int, ...], size: int) -> list[tuple[tuple[int, int], ...]]:
        return list(itertools.combinations(enumerate(case), size))

    def how_known(case: tuple[int, ...]) -> tuple[int, int, int]:
        """Least where there is most that no case taken has: values, then pairs, then what few of them have."""
        singles, pairs = parts(case, 1), parts(case, 2)
        num_known, num_known_pairs = (sum(times_taken[part] > 0 for part in of_size) for of_size in (singles, pairs))
        return num_known, num_known_pairs, sum(times_taken[part] for part in (*singles, *pairs))

    taken: set[tuple[int, ...]] = set()
    while len(taken) < min(n, len(cases)):
        case = min((case for case in cases if case not in taken), key=how_known)
        taken.add(case)
        times_taken.update((*parts(case, 1), *parts(case, 2)))
    return [
        pytest.param(
            *(of_factor[number] for of_factor, number in zip(values, case, strict=True)),
            marks=() if case in taken else pytest.mark.nightly,
        )
        for case in cases
    ]
