"""A product of parameters of which a sample runs by default and the rest by night."""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

import pytest

# parts of a case: factors with their values
Parts: TypeAlias = tuple[tuple[Hashable, Hashable], ...]


def sampled(*factors: Iterable[object], n: int) -> list[object]:
    """All combinations, for `parametrize`: `n` of them run by default, always the same; the others are for the night.

    Every value of every factor is in the sample, and of the pairs of values as many as fit. Pytest makes an `indirect`
    fixture anew for each case: what costs something is kept by name in a wider one.
    """
    values = [list(factor) for factor in factors]
    cases = list(itertools.product(*(range(len(of_factor)) for of_factor in values)))
    if n < max(map(len, values)):
        raise ValueError(f"n={n}: a factor has {max(map(len, values))} values, each of which must be run")
    taken = least_known([tuple(enumerate(case)) for case in cases], n, Counter())
    return [
        pytest.param(
            *(of_factor[index] for of_factor, index in zip(values, case, strict=True)),
            marks=() if number in taken else pytest.mark.nightly,
        )
        for number, case in enumerate(cases)
    ]


def least_known(cases: Sequence[Parts], n: int, times_taken: Counter[Parts]) -> set[int]:
    """Numbers of `n` cases, or of all: always the one of which most is in no case that was taken. `times_taken` counts
    parts and pairs of them, also over several calls."""

    def how_known(number: int) -> tuple[int, int, int]:
        """Least where there is most that no case taken has: values, then pairs, then what few of them have."""
        singles, pairs = (list(itertools.combinations(cases[number], size)) for size in (1, 2))
        num_known, num_known_pairs = (sum(times_taken[part] > 0 for part in of_size) for of_size in (singles, pairs))
        return num_known, num_known_pairs, sum(times_taken[part] for part in (*singles, *pairs))

    left = list(range(len(cases)))
    while left and len(cases) - len(left) < n:
        number = min(left, key=how_known)
        left.remove(number)
        times_taken.update(part for size in (1, 2) for part in itertools.combinations(cases[number], size))
    return set(range(len(cases))) - set(left)
