"""Work for the next token of a row that is too much for a step: it is done beside the steps, by one thread.

A step spends at most a fifth of its time on such work. What does not fit is done by a thread of its own, and the row is
*late*: it gets no token in this step, and is not computed again before the work is done or fits into a step.
The core learns of late rows as it learns of rejected drafts, from their numbers in StepOutput.speculated, so that time
decides when a token comes and never which.

Whose request has cost least goes first, so nobody's work waits for all of another request's. Work that does not end
fails its row, and another thread takes over: no row can hold the thread for ever.

The thread has the priority of the steps: one of a lower priority, holding Python's lock on a busy machine, would stop
them. What is long in a job is computed where it gives way and without that lock (structured_output/walk.py).

    step    begin ......... spends ......... end         thread    the cheapest request's oldest job, one at a time
            leaves out rows whose work is not done       fails a job after a while: the row, not the engine

Owns the jobs and the thread. Never reads the row table, a clock for a decision, or what the work is about. Called by
Sampler and by the processors that have such work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.messages import IntArray

# of a step, what may be spent on such work: with it four parts of something else
_SHARE = 0.2
# what is taken for a step before there was one, and the most: a step that stood still says nothing about the next
_FIRST_STEP_SECONDS = 0.001
_LONGEST_STEP_SECONDS = 0.1
# a step in which every row is late waits so long for one of them, instead of computing nothing at once
_PATIENCE_SECONDS = 0.002
# a job that takes longer will not end: the library's limits allow a hundredth of it
MOST_SECONDS_A_JOB = 20.0


class Account(Protocol):
    """On whose behalf work is done; rows may share one."""

    seconds: float


class Job:
    """Work of one row. `result` is there once `is_done` is; `error` is why there is none."""

    def __init__(self, row: int, account: Account, seconds: float, work: Callable[[], object]) -> None:
        self.row = row
        self.account = account
        # what it is expected to take
        self.seconds = seconds
        self.work = work
        self.began_at: float | None = None
        self.is_done = False
        self.result: object = None
        self.error: BaseException | None = None


class BesideSteps:
    """Jobs by row, a thread, and what a step may still spend itself."""

    def __init__(self, num_rows: int, clock: Callable[[], float] = time.perf_counter, *, is_alone: bool = True) -> None:
        """Not `is_alone`: other workers have the same rows and must find the same ones late, so no time decides, and
        all work is done where it is asked for."""
        self.is_alone = is_alone
        self._num_rows = num_rows
        self._clock = clock
        self.jobs: dict[int, Job] = {}
        # rows whose next token may need such work; without any, and nothing left of others, steps need not be told
        self.users: Collection[int] = ()
        # those of `jobs` that nobody has begun, oldest first
        self._queue: list[Job] = []
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._began_at = 0.0
        self._step_seconds = _FIRST_STEP_SECONDS
        self._left = 0.0
        # rows of this step that get no token in it
        self.late: set[int] = set()

    # ------------------------------------------------------------------------------------------ a step

    def begin(self) -> None:
        self._began_at = self._clock()
        self._left = _SHARE / (1 - _SHARE) * self._step_seconds
        self.late.clear()

    def end(self) -> None:
        self._step_seconds = min(self._clock() - self._began_at, _LONGEST_STEP_SECONDS)

    def leave_out(self, rows: IntArray, is_next: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which of these rows compute nothing in this step: those whose next token would come of it (`is_next`) and has
        to wait. If that is everybody, it is waited for them a little."""
        if not self.jobs:
            return np.zeros(len(rows), dtype=np.bool_)
        if is_next.all() and not self._fits(rows).any() and len(rows):
            self._wait()
        is_out = is_next & ~self._fits(rows)
        self.late.update(rows[is_out].tolist())
        return is_out

    def can_afford(self, seconds: float) -> bool:
        """Whether the step itself may do work that takes so long."""
        return not self.is_alone or seconds <= self._left

    def spend(self, seconds: float) -> None:
        self._left -= seconds

    # ------------------------------------------------------------------------------------------ jobs

    def start(self, job: Job) -> None:
        """The row is late until it is done."""
        self.late.add(job.row)
        if not self.is_alone:
            self.jobs[job.row] = job
            _finish(job)
            return
        with self._lock:
            self.jobs[job.row] = job
            self._queue.append(job)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-beside")
        self._thread.submit(self._run_next)

    def take(self, row: int) -> Job | None:
        """What was started for this row, which is forgotten with it: done, or withdrawn before anybody began. None:
        nothing was started, or it is being done, and the row is late."""
        job = self.jobs.get(row)
        if job is None:
            return None
        with self._lock:
            if job in self._queue:
                self._queue.remove(job)
            elif not job.is_done:
                self.late.add(row)
                return None
            del self.jobs[row]
        return job

    def forget(self, row: int) -> None:
        """Nobody waits any more. What is being done is brought to its end, for nobody."""
        with self._lock:
            job = self.jobs.pop(row, None)
            if job in self._queue:
                self._queue.remove(job)

    def has(self, row: int) -> bool:
        return row in self.jobs

    def close(self) -> None:
        with self._lock:
            self._queue.clear()
            self.jobs.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    # ------------------------------------------------------------------------------------------ inside

    def _fits(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Which rows need not wait: nothing was started for them, it is done, or the step has time for it after all.
        Of those that wait, the oldest job is looked at first."""
        self._fail_endless()
        is_waiting = np.zeros(self._num_rows, dtype=np.bool_)
        left = self._left
        with self._lock:
            for job in self.jobs.values():
                if not job.is_done and job.seconds <= left and job.began_at is None:
                    left -= job.seconds
                elif not job.is_done:
                    is_waiting[job.row] = True
        return ~is_waiting[rows]

    def _wait(self) -> None:
        self._news.clear()
        if not any(job.is_done for job in self.jobs.values()):
            began_at = self._clock()
            self._news.wait(_PATIENCE_SECONDS)
            # a step that waited is not one that may spend more
            self._began_at += self._clock() - began_at

    def _run_next(self) -> None:
        with self._lock:
            if not self._queue:
                return  # withdrawn
            job = min(self._queue, key=lambda queued: queued.account.seconds)
            self._queue.remove(job)
            job.began_at = self._clock()
        _finish(job)
        self._news.set()

    def _fail_endless(self) -> None:
        """The last resort, and the only place where time ends anything."""
        now = self._clock()
        for job in self.jobs.values():
            if job.is_done or job.began_at is None or now - job.began_at < MOST_SECONDS_A_JOB:
                continue
            job.error = TimeoutError(f"it took more than {MOST_SECONDS_A_JOB:g} s")
            job.is_done = True
            assert self._thread is not None
            self._thread.shutdown(wait=False)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-beside")
            for _ in self._queue:
                self._thread.submit(self._run_next)


def _finish(job: Job) -> None:
    # by the clock: most of it is computed in another thread, and one job at a time
    began = time.perf_counter()
    try:
        job.result = job.work()
    except BaseException as error:  # a panic of a library is no Exception; whoever takes the job raises it
        job.error = error
    job.account.seconds += time.perf_counter() - began
    job.is_done = True
