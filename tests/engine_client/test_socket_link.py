"""A core in its own process that one thread shuts down while another waits for it."""

import os
import signal
import threading
import time

import pytest
from tests.support.blocking_client import BlockingClient

from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.fake_llm import fake_link


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_thread_that_waits_hears_of_the_shutdown(is_silent):
    """Also if the core says nothing any more, as in a long step."""
    link = fake_link(own_process=True)
    client = BlockingClient(link)
    client.add(EngineRequest(request_id=1, prompt_token_ids=[5, 6], sampling=SamplingParams(max_tokens=1000)))
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            while True:
                client.receive()
        except BaseException as error:
            errors.append(error)

    client.control("hold", {"at": 3})
    if is_silent:
        os.kill(link.pid, signal.SIGSTOP)
    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    time.sleep(0.2)
    client.close()
    thread.join(10)
    [error] = errors
    assert (type(error).__name__, str(error)) == ("EngineDeadError", "The engine was shut down.")
    assert link.receive(0) == []
