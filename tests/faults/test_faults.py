"""A few of the faults, once each, on a core without a model. `make faults` does all of them, often, on a model."""

import asyncio
import json
from pathlib import Path

import pytest

from quire.testing.faults.__main__ import ALL_CASES, Trial, read, run, table, try_case
from quire.testing.faults.cases import Case
from quire.testing.faults.stage import Setting

QUICK = ("F1", "F3b", "F4", "F4c", "F5", "F19", "D2", "D4")
# of the starts that cannot succeed those that end before anything is loaded
QUICK_STARTS = ("a port in use", "a value out of bounds", "no such model", "a config.json that is no JSON")
SETTING = Setting(num_streams=4, is_paced=True, stall_timeout=1.0, num_aborts=100)


def case(id_: str) -> Case:
    return next(case for case in ALL_CASES if case.id == id_)


@pytest.mark.parametrize("name", [*QUICK, *(f"F18 {name}" for name in QUICK_STARTS)])
def test_a_fault(name):
    # what happened must be right; how long it took is judged on machines that do nothing else
    trial = asyncio.run(try_case(Case(name, "", case(name).run), SETTING))
    assert trial.error is None, trial.error


@pytest.mark.nightly
@pytest.mark.parametrize("name", [case.id for case in ALL_CASES])
def test_every_fault_on_a_model(name):
    trial = asyncio.run(try_case(case(name), Setting()))
    assert trial.error is None, trial.error


def test_a_case_that_fails_says_so():
    async def broken(setting: Setting) -> dict[str, float]:
        raise AssertionError("two requests ended twice")

    async def slow(setting: Setting) -> dict[str, float]:
        return {"noticed": 3.0}

    assert "ended twice" in str(asyncio.run(try_case(Case("X", "", broken), SETTING)).error)
    assert "goal missed: noticed" in str(asyncio.run(try_case(Case("Y", "", slow, {"noticed": 2.0}), SETTING)).error)


def test_runs_add_up(tmp_path: Path, capsys):
    asked: list[int] = []

    async def play(setting: Setting) -> dict[str, float]:
        asked.append(setting.num_streams)
        return {"noticed": 0.5}

    file, cases = tmp_path / "results.json", [Case("F2", "", play)]
    assert len(run(cases, SETTING, 2, file)) == 2
    assert len(run(cases, SETTING, 3, file)) == 3
    assert len(asked) == len(json.loads(file.read_text())) == 3
    assert "| F2 | kill -9 of the engine | 3/3 | noticed | 2 s | 0.50 s | 0.50 s |" in table(read(file))
    assert table([Trial("F2", "paced", error="broken")]).count("0/1") == 1
