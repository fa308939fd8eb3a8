"""The thread behind the in-process executor: order, results, and errors that reach whoever asks."""

from __future__ import annotations

import threading

import pytest

from quire.engine_core.executor.in_process import _WorkerThread


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
