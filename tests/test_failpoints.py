"""Failpoints: off unless the environment says so, and each where the table says."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire import failpoints
from quire.errors import OptionError
from quire.failpoints import EXIT_STATUS, POINTS, InjectedFaultError, arm, failpoint, is_armed

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "quire"


@pytest.fixture(autouse=True)
def _nothing_stays_armed() -> Iterator[None]:
    yield
    arm("")


def places_of_failpoints() -> dict[str, set[str]]:
    """Point -> files that pass it."""
    places: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoint":
                point = node.args[0]
                assert isinstance(point, ast.Constant), f"{path}:{node.lineno}: a failpoint's name is a literal"
                places.setdefault(point.value, set()).add(path.relative_to(SOURCE).as_posix())
    return places


def test_every_point_stands_where_the_table_says() -> None:
    assert places_of_failpoints() == {point: {file} for point, (file, _) in POINTS.items()}


def test_the_page_has_the_actions() -> None:
    page = (ROOT / "docs" / "failpoints.md").read_text(encoding="utf-8")
    for action in failpoints.ACTIONS:
        assert f"| `{action}` |" in page


def test_nothing_happens_unless_armed() -> None:
    assert not any(failpoint(point) for point in POINTS)
    arm("before_send:raise")
    assert failpoint("in_forward") is False
    with pytest.raises(InjectedFaultError, match="before_send"):
        failpoint("before_send")
    arm("")
    assert failpoint("before_send") is False


def test_only_the_environment_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when the program starts: a variable that changes later changes nothing."""
    monkeypatch.setenv("QUIRE_FAIL", "before_send:raise")
    assert failpoint("before_send") is False
    callers = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("arm", "failpoints.arm")
    ]
    assert callers == ["failpoints.py"]


@pytest.mark.parametrize(
    ("action", "status", "said"),
    [("exit", EXIT_STATUS, ""), ("kill9", -9, ""), ("raise", 1, "InjectedFaultError"), ("oom", 1, "MemoryError")],
)
def test_a_process_inherits_it(action: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from quire.failpoints import failpoint; failpoint('end_exit')"],
        env={**os.environ, "QUIRE_FAIL": f"end_exit:{action}", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == status
    assert said in done.stderr
    assert "failpoints are armed" in done.stderr


def test_after_and_count_choose_the_nth_pass() -> None:
    (fault,) = arm("in_forward:raise:after=2:count=1")
    passed = []
    for number in range(5):
        try:
            failpoint("in_forward")
        except InjectedFaultError:
            passed.append(number)
    assert passed == [2]
    assert (fault.num_passed, fault.num_fired) == (5, 1)


def test_a_probability_repeats_with_its_seed() -> None:
    def fired(text: str) -> list[bool]:
        (fault,) = arm(text)
        return [fault.fires(()) for _ in range(200)]

    first = fired("in_forward:raise:0.3:7")
    assert fired("in_forward:raise:0.3:7") == first
    assert fired("in_forward:raise:0.3:8") != first
    assert 30 < sum(first) < 90


def test_it_may_wait_for_a_number_that_the_point_sees() -> None:
    arm("nan_row:corrupt:when=7")
    assert is_armed("nan_row")
    assert not is_armed("in_forward")
    assert not failpoint("nan_row")
    assert not failpoint("nan_row", np.array([1, 2, 3]))
    assert failpoint("nan_row", np.array([1, 7]))
    assert failpoint("nan_row", lambda: (7,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("in_forwrd:raise", "in_forward"),
        ("in_forward:explode", "explode"),
        ("in_forward:corrupt", "corrupt"),
        ("in_forward", "point:action"),
        ("in_forward:raise:2", "0 to 1"),
        ("in_forward:raise:often", "often"),
        ("in_forward:raise:1:0:each=3", "each"),
    ],
)
def test_a_mistake_is_an_error(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        arm(text)


def test_a_point_that_is_not_in_the_table_is_a_mistake_of_ours() -> None:
    arm("in_forward:raise")
    with pytest.raises(KeyError, match="nowhere"):
        failpoint("nowhere")
