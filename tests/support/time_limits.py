"""A test that hangs fails under its name, and the others run on: a plugin of pytest, beside pytest-timeout.

After as many seconds as `timeout` in pyproject.toml says, a signal makes the test fail wherever Python can be
interrupted. Code in C that waits, or that keeps the interpreter's lock, is not interrupted. So a little later the
process is ended by a thread of faulthandler's, which needs no lock; xdist reports the test as failed and starts another
process.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Generator
from typing import Any

import pytest

# of a test that is marked as long
LONG_SECONDS = 3600.0
# between the signal and the end of the process
GRACE_SECONDS = 30.0

_limit = pytest.StashKey[float]()
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # while a test runs, what is written to descriptor 2 is kept by the process, and lost with it
    config.stash[_stderr] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in ("nightly", "gpu")):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))


# ---- when a process is ended


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[_limit] = settings.timeout
    _end_later(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that failed has cancelled its timer, and may have left behind what its fixtures wait for."""
    if _limit in item.stash:
        _end_later(item)


def pytest_timeout_cancel_timer() -> None:
    faulthandler.cancel_dump_traceback_later()


def _end_later(item: pytest.Item) -> None:
    seconds = item.stash[_limit] + GRACE_SECONDS
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_stderr])


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, sched: Any) -> None:
    """xdist hands out again, file by file, all that the ended process ever had. The same test would end the next one;
    and a process to which a file without an open test is handed out never asks for another."""
    files: dict[str, dict[str, bool]] = getattr(sched, "workqueue", {})
    for file, is_done in list(files.items()):
        is_done.pop(crashitem, None)
        if all(is_done.values()):
            del files[file]


# ---- what is reported


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report has the stack of the test; whom it waits for is in another thread."""
    is_late = call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value)
    if is_late:
        faulthandler.cancel_dump_traceback_later()
    report = yield
    if is_late:
        report.sections.append(("Stacks of the other threads", _stacks_of_others()))
    return report


def _stacks_of_others() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():
            stacks.append(f"{names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(stacks)
