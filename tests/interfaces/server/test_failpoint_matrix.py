"""F20: every failpoint with every action, under load or not. Nobody is ever told something wrong.

A client gets the right text or an error. Afterwards the server answers rightly again, or it has ended with a status
that says so; and nothing of it is left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from tests.support.completion_clients import Answer, CompletionClients, children_of
from tests.support.server_process import ServerProcess

from quire.failpoints import ACTIONS, CAN_CORRUPT, POINTS

pytestmark = pytest.mark.nightly

COMMAND = ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--device", "cpu", "--crash-reports", "none"]
COMMAND += ["--stall-timeout", "3", "--shutdown-timeout", "3"]
# So many passes go well in each process, where a load makes many: an engine that was started again serves for a while.
PASSES = {"before_schedule": 40, "before_execute": 40, "in_forward": 40, "before_sample": 40, "before_send": 30}
PASSES |= {"receive_request": 20, "after_allocate": 20, "nan_row": 40, "in_tokenise": 20, "in_detokenise": 40}
SECONDS_TO_RECOVER = 90


@pytest.fixture(scope="module")
def expected() -> Iterator[list[Answer]]:
    """What the clients are told by a server without faults."""
    with ServerProcess(COMMAND) as server:
        yield CompletionClients(server.wait_ready()).ask_all()


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("point", POINTS)
def test_a_fault(
    expected: list[Answer], monkeypatch: pytest.MonkeyPatch, point: str, action: str, is_busy: bool
) -> None:
    if action == "corrupt" and point not in CAN_CORRUPT:
        pytest.skip("this place cannot do the wrong thing by itself")
    passes = PASSES.get(point, 0) if is_busy else 0
    monkeypatch.setenv("QUIRE_FAIL", f"{point}:{action}:1:0:after={passes}:count=1")
    with ServerProcess(COMMAND) as server:
        if not is_ready(server, point, action):
            return
        clients = CompletionClients(server.wait_ready(1))
        family = children_of(server.pid)
        for number, answer in enumerate(clients.ask_all() if is_busy else [clients.ask(0)]):
            assert answer == expected[number] or answer.error, f"client {number} was told {answer}"
            assert answer.status in (0, 200, 500, 503)
        wait_until(lambda: server.has_ended or clients.ask(1) == expected[1])
        family += [] if server.has_ended else children_of(server.pid)
        if server.has_ended:
            assert server.wait(1) == 70
        else:
            assert clients.metric("num_requests_running") == clients.metric("kv_cache_blocks_held") == 0
            server.signal(signal.SIGTERM)
            assert server.wait(30) == 0 or point.startswith("end_")
    for child in family:
        wait_until(lambda child=child: not is_there(child))  # type: ignore[misc]


def is_ready(server: ServerProcess, point: str, action: str) -> bool:
    """False: a fault at the start has ended it, with a status that says so."""
    if point.startswith("start_") and action != "slow":
        if action == "hang":  # a start may take long; whoever waits for it gives up
            server.wait_for("failpoints are armed")
            server.signal(signal.SIGTERM)
        assert server.wait(60) != 0
        return False
    server.wait_ready()
    return True


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_TO_RECOVER
    while not is_done():
        assert time.monotonic() < deadline, "it did not recover"
        time.sleep(0.2)


def is_there(process_id: int) -> bool:
    with suppress(OSError):
        os.kill(process_id, 0)
        return True
    return False
