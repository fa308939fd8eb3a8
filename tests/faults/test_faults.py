"""A few of the faults, once each, on a core without a model. `make faults` does all of them, often, also on a model."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.faults import __main__ as faults
from tests.support.faults.case import Case, Core
from tests.support.faults.cases import CASES
from tests.support.faults.stage import Setting
from tests.support.faults.trials import Trial, read, run, table, try_case

QUICK = ("F1", "F3b", "F4", "F4c", "F5", "F19", "D2", "D4")
# of the starts that cannot succeed those that end before anything is loaded
QUICK_STARTS = ("a port in use", "a value out of bounds", "no such model", "a config.json that is no JSON")
SETTING = replace(Setting.small(), num_streams=4, is_paced=True, stall_timeout=1.0)


def case(id_: str) -> Case:
    return next(case for case in CASES if case.id == id_)


@pytest.mark.parametrize("name", [*QUICK, *(f"F18 {name}" for name in QUICK_STARTS)])
def test_a_fault(name):
    # what happened must be right; how long it took is judged on machines that do nothing else
    trial = asyncio.run(try_case(replace(case(name), goals={}), SETTING))
    assert trial.error is None, trial.error


@pytest.mark.nightly
@pytest.mark.parametrize("name", [case.id for case in CASES])
def test_every_fault(name):
    trial = asyncio.run(try_case(replace(case(name), goals={}), Setting.small()))
    assert trial.error is None, trial.error


def test_each_fault_has_a_name_of_its_own():
    assert len({case.id for case in CASES}) == len(CASES)


def test_a_case_that_fails_says_so():
    async def broken(setting: Setting) -> dict[str, float]:
        raise AssertionError("two requests ended twice")

    async def slow(setting: Setting) -> dict[str, float]:
        return {"noticed": 3.0}

    assert "ended twice" in str(asyncio.run(try_case(Case("X", "", broken), SETTING)).error)
    assert "goal missed: noticed" in str(asyncio.run(try_case(Case("Y", "", slow, {"noticed": 2.0}), SETTING)).error)


def test_runs_add_up(tmp_path: Path, capsys):
    asked: list[bool] = []

    async def play(setting: Setting) -> dict[str, float]:
        asked.append(setting.is_paced)
        return {"noticed": 0.5}

    file, cases = tmp_path / "results.json", [Case("F2", "", play, times=3, core=Core.EITHER)]
    assert len(run(cases, SETTING, 2, file)) == 2
    assert len(run(cases, SETTING, None, file)) == 3, "as often as the case says, those of before included"
    assert len(asked) == len(json.loads(file.read_text())) == 3
    # on another core it is another experiment
    assert len(run(cases, replace(SETTING, is_paced=False), 1, file)) == 4
    assert asked == [True, True, True, False]
    row = "| F2 | kill -9 of the engine | embedded, paced | 4/4 |  | noticed | 2 s | 0.50 s | 0.50 s |"
    assert row in table(read(file))
    assert table([Trial("F2", "paced", error="broken")]).count("0/1") == 1


def test_numbers_can_be_said(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(faults, "run", lambda cases, setting, *others: asked.append((cases, setting, *others)) or [])
    assert faults.main(["--only", "F15*,F2", "--small", "--paced", "--streams", "3", "--slow-seconds", "1.5"]) == 0
    [(cases, setting, times, path)] = asked
    assert [case.id for case in cases] == ["F2", *(f"F15{letter}" for letter in "abcdef")]
    assert (setting.num_streams, setting.slow_seconds, setting.is_paced) == (3, 1.5, True)
    assert setting.num_rounds == Setting.small().num_rounds
    assert (times, path) == (None, None), "as often as each says, and nothing is kept"
    with pytest.raises(SystemExit):
        faults.main(["--only", "F99"])
    assert "there are F1, F2" in capsys.readouterr().err


def test_what_was_heard_stands_in_the_results():
    async def play(setting: Setting) -> dict[str, float]:
        history = setting.history()
        history.right["a"] = "one"
        history.records += [record("a", "one"), record("a", "two")]
        return {}

    trial = asyncio.run(try_case(Case("F2", "", play), replace(SETTING, right_answers={True: {}, False: {}})))
    assert (trial.heard["finished"], trial.heard["wrong"]) == (2, 1)


def record(prompt: str, text: str):
    from tests.support.faults.history import FINISHED, Record

    return Record(prompt, 0.0, 1.0, text, FINISHED, num_ends=1)
