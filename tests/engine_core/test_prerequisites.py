"""What a request waits for before it stands in line: several kinds, one after the other, each of them on its own."""

import pytest

from quire.engine_core.request import Request
from quire.engine_core.scheduler.prerequisites import Prerequisite
from quire.engine_core.step_observer import StepObserver, StepObservers
from quire.testing.core import CoreUnderTest


class Gate(Prerequisite):
    """Requests with these ids wait until it is opened for them."""

    def __init__(self, *waiting: int) -> None:
        self._held = set(waiting)
        self._waiting: dict[int, Request] = {}
        self._opened: list[tuple[Request, str | None]] = []
        self.asked_for: list[int] = []
        self.ended_ids: list[int] = []
        self.num_settled = 0

    def open(self, request_id: int, refusal: str | None = None) -> None:
        self._opened.append((self._waiting.pop(request_id), refusal))

    def reason_to_refuse(self, request: Request) -> str | None:
        return "this gate is closed for good" if request.request_id == 9 else None

    def ask(self, request: Request) -> bool:
        self.asked_for.append(request.request_id)
        if request.request_id not in self._held:
            return False
        self._waiting[request.request_id] = request
        return True

    def arrived(self) -> list[tuple[Request, str | None]]:
        opened = self._opened
        self._opened = []
        return opened

    def ended(self, request: Request) -> None:
        self.ended_ids.append(request.request_id)

    def settled(self) -> None:
        self.num_settled += 1


def core_with(*gates: Gate) -> CoreUnderTest:
    return CoreUnderTest(prerequisites=gates)


def test_who_waits_stands_in_nobodys_way() -> None:
    gate = Gate(1)
    core = core_with(gate)
    core.add(1, [1, 2, 3], max_tokens=2)
    core.add(2, [4, 5, 6], max_tokens=2)
    core.run()
    assert list(core.ends) == [2 << 10]
    assert core.core.scheduler.statistics()["num_requests_waiting"] == 1
    gate.open(1)
    core.add(3, [7], max_tokens=1)
    core.run()
    assert core.ends[1 << 10].finish_reason == "length"
    assert gate.ended_ids == [2, 3, 1]
    assert gate.num_settled > 0


def test_the_next_kind_is_asked_when_the_one_before_has_let_it_go() -> None:
    first, second = Gate(1), Gate(1)
    core = core_with(first, second)
    core.add(1, [1, 2, 3], max_tokens=2)
    assert first.asked_for == [1]
    assert second.asked_for == []
    first.open(1)
    core.run()
    assert second.asked_for == [1]
    assert core.ends == {}
    second.open(1)
    core.add(2, [1], max_tokens=1)
    core.run()
    assert core.ends[1 << 10].finish_reason == "length"


def test_what_does_not_come_ends_its_request_alone() -> None:
    first, second = Gate(1, 2), Gate()
    core = core_with(first, second)
    for number in (1, 2):
        core.add(number, [1, 2, 3], max_tokens=2)
    first.open(1, "it is broken")
    first.open(2)
    core.add(3, [1], max_tokens=1)
    core.run()
    assert core.ends[1 << 10].error == "it is broken"
    assert core.ends[2 << 10].finish_reason == "length"
    assert second.asked_for == [3, 2]


def test_one_that_is_aborted_while_it_waits_does_not_come_back() -> None:
    first, second = Gate(1), Gate()
    core = core_with(first, second)
    core.add(1, [1, 2, 3], max_tokens=2)
    core.core.scheduler.abort([1])
    first.open(1)
    core.add(2, [1], max_tokens=1)
    core.run()
    assert core.ends[1 << 10].finish_reason == "abort"
    assert second.asked_for == [2]


def test_any_kind_may_refuse_for_good() -> None:
    core = core_with(Gate(), Gate())
    core.add(9, [1, 2, 3], max_tokens=2)
    core.run()
    assert core.ends[9 << 10].error == "this gate is closed for good"


def test_an_observer_hears_what_it_overrides_alone() -> None:
    class Settled(StepObserver):
        num_settled = 0

        def settled(self) -> None:
            self.num_settled += 1

    settled = Settled()
    observers = StepObservers([settled, StepObserver()])
    observers.begins()
    observers.ends("schedule")
    observers.settled()
    assert settled.num_settled == 1
    assert [len(kind) for kind in (observers._begins, observers._decided, observers._ends, observers._settled)] == [
        0, 0, 0, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("is_async", [False, True])
def test_decisions_are_told_in_order_before_they_are_executed(is_async: bool) -> None:
    core = CoreUnderTest(is_async=is_async)
    told: list[int] = []
    core.core.watch_steps(lambda decision, work: told.append(decision.step))
    core.executor.observers.append(lambda decided: told.append(-decided.step))
    core.add(1, [1, 2, 3], max_tokens=3)
    core.run()
    assert told[:4] == [1, -1, 2, -2]
