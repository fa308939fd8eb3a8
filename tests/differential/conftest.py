"""What of these products runs by default: of a test with many cases a third. `make nightly` runs them all.

They took a fifth of the default run's time, and most cases differ by one model or one way of scheduling. Every value
of a parameter stays in some case of its file.
"""

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from tests.support.sampled import Parts, least_known

_HERE = Path(__file__).parent
_FEW_CASES = 4


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("[" in argument for argument in config.args):
        return  # who names cases means these
    cases_by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("nightly") is None:
            cases_by_test[item.nodeid.partition("[")[0]].append(item)
    times_taken: dict[Path, Counter[Parts]] = defaultdict(Counter)
    left: list[pytest.Item] = []
    for cases in cases_by_test.values():
        num_daily = min(len(cases), max(_FEW_CASES, -(-len(cases) // 3)))
        daily = least_known([_parts_of(case) for case in cases], num_daily, times_taken[cases[0].path])
        left += [case for number, case in enumerate(cases) if number not in daily]
    for case in left:
        parts = [(part,) for part in _parts_of(case)]
        taken = times_taken[case.path]
        if all(taken[part] for part in parts):
            case.add_marker(pytest.mark.nightly)
        taken.update(parts)


def _parts_of(case: pytest.Item) -> Parts:
    parameters = case.callspec.params if hasattr(case, "callspec") else {}
    return tuple(sorted((name, repr(value)) for name, value in parameters.items()))
