"""All faults, in their order."""

from __future__ import annotations

from tests.support.faults import (
    deaths,
    endings,
    hostile,
    leavers,
    shortages,
    slow_clients,
    start_up,
    walls,
    wrong_numbers,
)

CASES = (
    *deaths.CASES,
    *walls.CASES,
    *leavers.CASES,
    *slow_clients.CASES,
    *wrong_numbers.CASES,
    *shortages.CASES,
    *start_up.CASES,
    *endings.CASES,
    *hostile.CASES,
)
