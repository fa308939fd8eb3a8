"""The thread behind the in-process executor: order, results, and errors that reach whoever asks."""

from __future__ import annotations

import threading

import pytest

from quire.engine_core.executor.executor import STEP_TIMES
from quire.engine_core.executor.in_process import InProcessExecutor, _WorkerThread
from quire.messages import SchedulerOutput


@pytest.fixture
def thread():
    thread = _WorkerThread()
    yield thread
    thread.end()


def test_calls_are_done_in_order_by_one_thread(thread):
    seen = []

    def note(number):
        seen.append((number, threading.current_thread().name))
        return 10 * number

    calls = [thread.submit(note, number) for number in range(50)]
    assert [call.result() for call in calls] == [10 * number for number in range(50)]
    assert seen == [(number, "quire-worker") for number in range(50)]


def test_an_error_comes_with_its_own_call_and_no_other(thread):
    def fail():
        raise ValueError("no such block")

    failed, fine = thread.submit(fail), thread.submit(lambda: "fine")
    for _ in range(2):  # a result may be asked for again
        with pytest.raises(ValueError, match="no such block"):
            failed.result()
        assert fine.result() == "fine"


def test_the_caller_goes_on_while_a_call_is_done(thread):
    go_on = threading.Event()
    call = thread.submit(go_on.wait)
    with pytest.raises(TimeoutError):
        call.result(timeout=0.01)
    go_on.set()
    assert call.result() is True


def test_what_was_handed_in_is_done_before_the_end(thread):
    done = []
    for number in range(5):
        thread.submit(done.append, number)
    thread.end()
    assert done == list(range(5))


class StuckWorker:
    """Computes a step until it may end."""

    def __init__(self, config, ranks=None):
        self.may_end = threading.Event()

    def load(self):
        pass

    def execute(self, scheduled):
        return self.may_end.wait()

    def control(self, name, args):
        return {"name": name}

    def shutdown(self):
        pass


def test_times_of_steps_are_read_while_a_step_is_computed(monkeypatch):
    monkeypatch.setattr("quire.worker.worker.Worker", StuckWorker)
    executor = InProcessExecutor(None)
    executor.run_ahead()
    step = executor.execute(SchedulerOutput(step=1))
    reader = threading.Thread(target=executor.control, args=(STEP_TIMES, {}), daemon=True)
    reader.start()
    reader.join(10)
    has_read = not reader.is_alive()
    executor.worker.may_end.set()
    assert step.result() is True
    assert has_read
    executor.shutdown()
