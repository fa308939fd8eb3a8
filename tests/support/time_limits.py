"""A test that hangs fails under its name, and the others run on: a plugin of pytest, beside pytest-timeout.

After as many seconds as `timeout` in pyproject.toml says, a signal makes the test fail wherever Python can be
interrupted. Code in C that waits, or that keeps the interpreter's lock, is not interrupted. So a little later the
process is ended by a thread of faulthandler's, which needs no lock; xdist reports the test as failed and starts another
process.
"""

from __future__ import annotations

import faulthandler
import os
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
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.file_scheduling import FileScheduling

    return FileScheduling(config, log)
