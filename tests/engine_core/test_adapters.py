"""The core's registry of adapters, with several front ends that load at the same time, over a worker that is told when
it is done."""

from typing import Any

import pytest

from quire.engine_core.adapters import EngineAdapters
from quire.errors import UserError


class Worker:
    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}

    def control(self, name: str, args: dict[str, Any]) -> Any:
        number = args["number"]
        if name == "load_adapter":
            self.states[number] = {"state": "loading", "error": None, "content": ""}
        elif name == "drop_adapter":
            del self.states[number]
        else:
            return self.states[number]
        return None

    def ends(self, number: int, error: str | None = None) -> None:
        self.states[number] = {
            "state": "ready" if error is None else "failed",
            "error": error,
            "content": f"content of {number}",
        }


@pytest.fixture
def house() -> tuple[EngineAdapters, Worker]:
    worker = Worker()
    return EngineAdapters(worker.control, 3), worker


def names(adapters: EngineAdapters) -> list[tuple[str, int]]:
    return [(entry["name"], entry["number"]) for entry in adapters.all()]


def test_two_that_load_one_name_make_one_entry(house: tuple[EngineAdapters, Worker]) -> None:
    adapters, worker = house
    assert adapters.load("sql", "/a") == 1
    for in_place in (False, True):
        assert adapters.load("sql", "/a", in_place) is None, "it is being loaded"
    worker.ends(1)
    assert adapters.load("sql", "/a") is None
    assert adapters.state(1) == "ready"
    assert names(adapters) == [("sql", 1)]


def test_another_version_takes_the_place_when_it_is_ready(house: tuple[EngineAdapters, Worker]) -> None:
    adapters, worker = house
    adapters.load("sql", "/a")
    worker.ends(1)
    assert adapters.load("sql", "/b", in_place=True) == 2
    assert names(adapters) == [("sql", 1)]
    worker.ends(2)
    assert names(adapters) == [("sql", 2)]
    adapters.drop_unused(iter([1]))
    assert 1 in worker.states, "a request still runs with it"
    adapters.drop_unused(iter([]))
    assert sorted(worker.states) == [2]


def test_one_whose_front_end_has_died_is_there_all_the_same(house: tuple[EngineAdapters, Worker]) -> None:
    adapters, worker = house
    adapters.load("sql", "/a")
    worker.ends(1)
    assert names(adapters) == [("sql", 1)]
    assert adapters.load("sql", "/a") is None


def test_one_that_failed_holds_neither_its_name_nor_its_place(house: tuple[EngineAdapters, Worker]) -> None:
    adapters, worker = house
    for number in (1, 2, 3):
        assert adapters.load("sql", "/broken") == number
        worker.ends(number, "is broken")
    assert names(adapters) == []
    assert adapters.load("sql", "/a") == 4
    with pytest.raises(UserError, match="sql: is broken"):
        adapters.state(1)
    with pytest.raises(UserError, match="not loaded"):
        adapters.state(1)


def test_one_that_is_unloaded_while_it_is_loaded_is_never_listed(house: tuple[EngineAdapters, Worker]) -> None:
    adapters, worker = house
    adapters.load("sql", "/a")
    assert adapters.unload(1)
    worker.ends(1)
    assert names(adapters) == []
    assert adapters.load("sql", "/a") == 2
    adapters.drop_unused(iter([]))
    assert sorted(worker.states) == [2]


def test_there_are_no_more_than_memory_is_for(house: tuple[EngineAdapters, Worker]) -> None:
    adapters, worker = house
    for number in (1, 2, 3):
        adapters.load(f"a{number}", "/a")
        worker.ends(number)
    with pytest.raises(UserError, match="3 adapters are in memory"):
        adapters.load("a4", "/a")
