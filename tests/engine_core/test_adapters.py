"""The core's registry of adapters, with several front ends that load at the same time and requests that use them, over
a worker that is told when it is done."""

from typing import Any

import pytest

from quire.engine_core.scheduler.adapters import EngineAdapters
from quire.errors import UserError
from quire.messages import AbortRequests, EngineRequest, ExtendRequest
from quire.sampling_params import SamplingParams
from quire.testing.core import CoreUnderTest

READY, LOADING = "ready", "loading"


class Worker:
    def __init__(self) -> None:
        # of those in memory
        self.states: dict[int, dict[str, Any]] = {}
        self.loads: list[int] = []
        self.dropped: set[int] = set()

    def control(self, name: str, args: dict[str, Any]) -> Any:
        number = args["number"]
        if name == "load_adapter":
            assert number not in self.states
            self.states[number] = {"state": LOADING, "error": None, "content": ""}
            self.loads.append(number)
        elif name == "evict_adapter":
            del self.states[number]
        elif name == "drop_adapter":
            self.states.pop(number, None)
            self.dropped.add(number)
        elif name == "await_adapter":
            # nobody but the test says that it has come
            assert self.states[number]["state"] == LOADING
        else:
            assert name == "adapter_state"
            return self.states[number]
        return None

    def ends(self, number: int, error: str | None = None) -> None:
        self.states[number] = {
            "state": READY if error is None else "failed",
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
    adapters.settled()
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
    adapters.settled()
    assert sorted(worker.states) == [2]


class Served:
    """A core with room for so many adapters, of which more are loaded."""

    def __init__(self, most: int, number: int) -> None:
        self.worker = Worker()
        self.adapters = EngineAdapters(self.worker.control, most)
        self.under_test = CoreUnderTest(adapters=self.adapters)
        self.core = self.under_test.core
        for one in range(1, number + 1):
            assert self.adapters.load(f"a{one}", f"/{one}") == one
            self.worker.ends(one)
            assert self.adapters.state(one) == READY

    def add(self, request_id: int, adapter: int, max_tokens: int = 2) -> None:
        self.under_test.add(request_id, [1, 2, 3, request_id + 4], request={"adapter": adapter}, max_tokens=max_tokens)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.under_test.step()

    def end_of(self, request_id: int) -> str | None:
        end = self.under_test.ends.get(request_id << 10)
        return end.error or end.finish_reason if end is not None else None

    @property
    def here(self) -> list[int]:
        return sorted(self.worker.states)


def meant(served: Served, number: int) -> int:
    message = EngineRequest(request_id=99, prompt_token_ids=[1], sampling=SamplingParams(), adapter=number)
    return served.adapters.meant_by(message).adapter


def test_a_request_on_its_way_to_a_version_gets_the_one_that_took_its_place() -> None:
    served = Served(3, 1)
    for number in (2, 3):
        assert served.adapters.load("a1", f"/{number}", in_place=True) == number
        served.worker.ends(number)
        served.adapters.all()
        served.add(number, number - 1)
        assert served.core.scheduler.lifecycle.requests[number].message.adapter == number
    assert meant(served, 1) == 1, "the one before the last is known to nobody who asks now"
    served.adapters.unload(3)
    assert meant(served, 2) == 2, "nothing took its place for good"


def test_the_least_recently_used_of_the_idle_ones_leaves() -> None:
    served = Served(3, 3)
    served.add(0, 1)
    served.steps(5)
    served.add(1, 2, max_tokens=40)
    served.steps(1)
    served.adapters.load("a4", "/4")
    assert served.here == [1, 2, 4], "3 was used by nobody"
    served.worker.ends(4)
    served.adapters.load("a5", "/5")
    assert served.here == [2, 4, 5], "2 is in use"
    assert [name for name, _ in names(served.adapters)] == ["a1", "a2", "a3", "a4"], "those that left are listed"


def test_one_that_left_comes_back_for_a_request_while_others_go_on() -> None:
    served = Served(2, 3)
    assert served.here == [2, 3]
    served.add(0, 0, max_tokens=30)
    served.add(1, 1)
    served.steps(4)
    assert served.here == [1, 3]
    assert len(served.under_test.tokens[0]) > 0
    assert served.end_of(1) is None
    assert not served.under_test.tokens[1 << 10]
    served.worker.ends(1)
    served.steps(4)
    assert served.end_of(1) == "length"
    assert served.end_of(0) is None
    assert names(served.adapters)[0] == ("a1", 1), "under the same number"


def test_what_cannot_be_read_again_fails_its_requests_alone() -> None:
    served = Served(1, 2)
    served.add(0, 1)
    served.add(1, 0, max_tokens=4)
    served.steps(1)
    served.worker.ends(1, "adapter_config.json: is not there.")
    served.steps(6)
    assert served.end_of(0) == "a1: adapter_config.json: is not there."
    assert served.end_of(1) == "length"
    assert len(names(served.adapters)) == 2, "the folder may come back"
    served.add(2, 1)
    served.steps(1)
    served.worker.ends(1)
    served.steps(4)
    assert served.end_of(2) == "length"


def test_few_are_read_at_a_time_and_each_has_its_turn() -> None:
    served = Served(3, 9)
    served.worker.loads.clear()
    served.add(0, 0, max_tokens=200)
    for number in range(1, 40):
        served.add(number, number % 9 + 1)
    done: list[int] = []
    for _ in range(60):
        served.steps(1)
        loading = [number for number in served.here if served.worker.states[number]["state"] == LOADING]
        assert len(loading) <= 2
        for number in loading:
            served.worker.ends(number)
        done = [number for number in range(1, 40) if served.end_of(number) == "length"]
    assert len(done) == 39
    assert len(served.under_test.tokens[0]) >= 55, "it had a token in nearly each step"
    assert len(served.worker.loads) <= 9 + 3, "those of one adapter were served together"


def test_a_stream_of_requests_for_one_does_not_keep_out_another() -> None:
    served = Served(1, 2)
    served.add(0, 2)
    served.steps(1)
    served.add(1, 1)
    for number in range(2, 30):
        # whoever comes for the one that is there would keep it there
        served.add(number, 2)
        served.steps(1)
        if served.here == [1]:
            served.worker.ends(1)
        if served.end_of(1):
            break
    assert served.end_of(1) == "length"
    for _ in range(8):
        served.steps(1)
        if served.worker.states[2 if 2 in served.worker.states else 1]["state"] == LOADING:
            served.worker.ends(2)
    assert all(served.end_of(number) == "length" for number in range(number + 1))


def test_nothing_contradicts_itself_between_a_failure_and_who_is_told_of_it() -> None:
    """A client that lists adapters is the first to see that one cannot be read, and a check may come next."""
    served = Served(1, 2)
    served.add(0, 1)
    served.steps(1)
    served.worker.ends(1, "is broken")
    served.adapters.all()
    served.core.scheduler.check_invariants()
    served.adapters.unload(1)
    served.steps(2)
    assert served.end_of(0) == "a1: is broken"
    assert served.worker.dropped == {1}


def test_a_prompt_that_arrives_in_pieces_goes_on_when_its_adapter_is_unloaded() -> None:
    served = Served(1, 1)
    served.under_test.add(0, [1, 2, 3], request={"adapter": 1}, max_tokens=2, is_final=False)
    served.steps(2)
    served.adapters.unload(1)
    served.core.extend(ExtendRequest(request_id=0, token_ids=[4, 5], is_final=True))
    served.steps(6)
    assert served.end_of(0) == "length"
    served.add(1, 1)
    served.steps(1)
    assert "not loaded any more" in str(served.end_of(1))


def test_who_gives_up_waiting_leaves_nothing() -> None:
    served = Served(1, 2)
    served.add(0, 2, max_tokens=50)
    served.steps(1)
    served.add(1, 1)
    served.steps(2)
    assert served.here == [2], "it is in use"
    served.core.abort(AbortRequests(request_ids=[1]))
    served.steps(2)
    served.add(2, 2)
    served.steps(4)
    assert served.end_of(2) == "length", "the one that is there is not about to leave"
    served.adapters.unload(2)
    served.steps(2)
    assert served.here == [2], "a request still runs with it"
    served.core.abort(AbortRequests(request_ids=[0]))
    served.steps(2)
    assert served.worker.dropped == {2}
