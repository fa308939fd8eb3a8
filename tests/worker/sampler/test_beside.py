"""Work beside the steps: what a step may spend, whose turn it is, and that no row holds the thread for ever."""

import threading

import numpy as np
import pytest

from quire.messages import int_array
from quire.structured_output.walk import Effort
from quire.worker.sampler.beside import MOST_SECONDS_A_JOB, BesideSteps, Job
from quire.worker.sampler.processors.structured_output import StructuredOutput

ROWS = int_array([0, 1, 2, 3])


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Account:
    def __init__(self, seconds=0.0):
        self.seconds = seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def beside(clock):
    beside = BesideSteps(8, clock)
    yield beside
    beside.close()


class Gate:
    """Work that waits until it is let through; the order in which work began is kept."""

    def __init__(self):
        self.began = []
        self.has_begun = threading.Event()
        self._open = threading.Event()

    def work(self, name):
        def run():
            self.began.append(name)
            self.has_begun.set()
            assert self._open.wait(60)
            return name

        return run

    def open(self):
        self._open.set()


def job_of(row, work, account=None, seconds=1.0):
    return Job(row, account or Account(), seconds, work)


def left_out(beside, is_next=(True, False, False, False)):
    """Rows of a new step that compute nothing; others go on, so nobody waits for them."""
    beside.begin()
    return ROWS[beside.leave_out(ROWS, np.array(is_next))].tolist()


def wait_for(job):
    barrier = threading.Event()
    for _ in range(6000):
        if job.is_done:
            return
        barrier.wait(0.01)
    raise AssertionError("the job did not end")


def test_a_step_spends_a_fifth_of_its_time(beside, clock):
    """Of the step before it: four parts of something else, one of this."""
    beside.begin()
    clock.now += 0.008
    beside.end()
    beside.begin()
    assert beside.can_afford(0.002)
    assert not beside.can_afford(0.0021)
    beside.spend(0.0015)
    assert beside.can_afford(0.0005)
    assert not beside.can_afford(0.0006)
    # one that stood still allows no more than any other
    clock.now += 3600
    beside.end()
    beside.begin()
    assert not beside.can_afford(0.026)


def test_a_row_is_late_until_its_work_is_done(beside):
    gate = Gate()
    beside.begin()
    job = job_of(0, gate.work("mask"))
    beside.start(job)
    assert beside.late == {0}
    assert left_out(beside) == [0]
    assert beside.late == {0}
    # a row that still has a prompt to compute does so
    assert left_out(beside, (False, False, False, False)) == []
    assert gate.has_begun.wait(60)
    assert beside.take(0) is None
    assert beside.late == {0}
    gate.open()
    wait_for(job)
    assert left_out(beside) == []
    assert beside.take(0) is job
    assert (job.result, job.error) == ("mask", None)
    assert not beside.has(0)


def test_work_that_nobody_has_begun_is_withdrawn(beside):
    gate = Gate()
    beside.begin()
    beside.start(job_of(0, gate.work("first")))
    assert gate.has_begun.wait(60)
    waiting = job_of(1, gate.work("second"), seconds=0.0)
    beside.start(waiting)
    # the step has time for it after all
    assert left_out(beside, (True, True, False, False)) == [0]
    assert beside.take(1) is waiting
    assert not waiting.is_done
    gate.open()
    assert gate.began == ["first"]


def test_whose_request_has_cost_least_goes_first(beside):
    gate = Gate()
    beside.begin()
    greedy, modest = Account(5.0), Account(0.1)
    jobs = [job_of(row, gate.work(row), greedy) for row in range(3)] + [job_of(3, gate.work(3), modest)]
    for job in jobs:
        beside.start(job)
    assert gate.has_begun.wait(60)
    gate.open()
    for job in jobs:
        wait_for(job)
    # the first had begun before the others were there, at most
    assert gate.began.index(3) <= 1
    assert [row for row in gate.began if row != 3] == [0, 1, 2]


def test_work_that_fails_says_so_to_whoever_takes_it(beside):
    def failing():
        raise RuntimeError("the library fell over")

    beside.begin()
    job = job_of(2, failing)
    beside.start(job)
    wait_for(job)
    assert beside.take(2) is job
    assert "fell over" in str(job.error)


def test_work_that_does_not_end_fails_its_row_and_frees_the_others(beside, clock):
    """By a clock that is handed in; it is the only thing here that time decides."""
    gate, other = Gate(), Gate()
    other.open()
    beside.begin()
    endless = job_of(0, gate.work("endless"))
    beside.start(endless)
    assert gate.has_begun.wait(60)
    behind = job_of(1, other.work("behind"))
    beside.start(behind)
    clock.now += MOST_SECONDS_A_JOB / 2
    assert left_out(beside, (True, True, False, False)) == [0, 1]
    clock.now += MOST_SECONDS_A_JOB
    left_out(beside, (True, True, False, False))
    assert isinstance(endless.error, TimeoutError)
    wait_for(behind)
    assert beside.take(0) is endless
    gate.open()


def test_a_row_that_is_released_is_forgotten(beside):
    gate = Gate()
    beside.begin()
    beside.start(job_of(0, gate.work("first")))
    assert gate.has_begun.wait(60)
    beside.start(job_of(1, gate.work("second")))
    beside.forget(0)
    beside.forget(1)
    assert left_out(beside, (True, True, False, False)) == []
    assert not beside.has(1)
    gate.open()
    assert gate.began == ["first"]


def test_copies_for_forks_take_of_the_time_of_a_step(beside, clock, monkeypatch):
    """Of a large grammar each takes milliseconds, and a request may have many beams."""

    class Walk:
        def __init__(self):
            self.effort = Effort()
            self.effort.copy_seconds = 0.001
            self.copies = []

        def child(self, *, may_copy):
            self.copies.append(may_copy)
            clock.now += 0.001 * may_copy
            return Walk()

    monkeypatch.setattr("quire.worker.sampler.processors.structured_output.time.perf_counter", clock)
    rule = StructuredOutput(None, None, beside, {})
    beside.begin()
    clock.now += 0.01
    beside.end()
    for _ in range(2):
        beside.begin()
        parent = Walk()
        for _ in range(6):
            rule.state_of_child(parent)
        assert parent.copies == [True, True, False, False, False, False], "0.0025 of 0.01 seconds"
