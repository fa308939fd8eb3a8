"""The checker of histories finds what it is there for."""

import pytest
from tests.support.faults.history import BROKEN, FAILED, FINISHED, REFUSED, History, Record


def history(record: Record, *faults: tuple[float, float], may_break: bool = False) -> History:
    return History({"a": "one two three"}, [record], list(faults), may_break)


def record(**fields: object) -> Record:
    return Record("a", **{"began": 1.0, "ended": 2.0, "num_ends": 1, **fields})


WHOLE = "one two three"
DEATH = {"end": FAILED, "code": "engine_restarted"}


@pytest.mark.parametrize(
    ("heard", "faults"),
    [
        (record(text=WHOLE, end=FINISHED), []),
        (record(text="one t", **DEATH), [(1.5, 1.6)]),
        (record(text="", end=REFUSED, code="service_unavailable"), [(0.0, 1.0)]),
    ],
)
def test_what_is_right(heard, faults):
    assert history(heard, *faults).mistakes() == []


@pytest.mark.parametrize(
    ("heard", "faults", "why"),
    [
        (record(text="one two", end=FINISHED), [], "wrong text"),
        (record(text="two", **DEATH), [(1.0, 2.0)], "no beginning"),
        (record(text="one", **DEATH), [], "without a fault"),
        (record(text="one", **DEATH), [(2.1, 3.0)], "without a fault"),
        (record(text="one", end=FAILED, code="internal_error"), [(1.0, 2.0)], "not documented"),
        (record(text=WHOLE, end=FINISHED, num_ends=2), [], "ended 2 times"),
        (record(text="one", end=BROKEN, num_ends=0), [(1.0, 2.0)], "neither an end nor an error"),
    ],
)
def test_what_is_wrong(heard, faults, why):
    [mistake] = history(heard, *faults).mistakes()
    assert why in mistake


def test_connections_break_when_the_server_is_ended():
    assert history(record(text="one", end=BROKEN, num_ends=0), may_break=True).mistakes() == []
