"""What of these products runs by default: of a test with many cases every second one. `make nightly` runs them all.

They took a fifth of the default run's time, and most cases differ by one model or one way of scheduling.
"""

from collections import defaultdict
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_FEW_CASES = 4


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.is_relative_to(_HERE):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_a_test in cases.values():
        daily = [item for item in of_a_test if item.get_closest_marker("nightly") is None]
        if len(daily) > _FEW_CASES:
            for item in daily[1::2]:
                item.add_marker(pytest.mark.nightly)
