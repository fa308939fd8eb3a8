"""A machine is gone in the middle of streams: who waits has an error, and the server serves again with the next one."""

import os
import signal

import pytest
from tests.support.ray_servers import PROMPTS, concerned_by, far_ranks, serving
from tests.support.streams import Client, ServedTime, answers, is_ready, until

# from the loss on, or where a signal only stops a rank from the end of the step in flight
LIMIT = 2.0
STEP = 0.1


def check_loss(server, url, what, expected, limit=LIMIT):
    concerned = [os.getpid(), *concerned_by(server)]
    clients = [Client(url, prompt) for prompt in PROMPTS]
    until(lambda: all(client.said for client in clients), 60.0, "no token came")
    served = ServedTime(concerned)
    what()
    until(lambda: not is_ready(url), limit, "it says that it is ready", concerned)
    for client, said in zip(clients, expected, strict=True):
        client.join(30)
        assert client.error is not None
        assert served.until(client.ended_at) < limit + 1
        length = min(len(client.said), len(said))
        assert client.said[:length] == said[:length], "a wrong token"


@pytest.mark.parametrize("size", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_a_machine_is_gone_and_comes_back(cluster, checkpoint, size):
    with serving(checkpoint, size) as server:
        url = server.wait_ready()
        expected = answers(url, PROMPTS)
        before = far_ranks()
        assert len(before) == 1
        check_loss(server, url, lambda: cluster.remove_node(cluster.second, allow_graceful=False), expected)
        cluster.bring_back()
        until(lambda: is_ready(url), 120.0, "it did not serve again")
        assert answers(url, PROMPTS) == expected
        assert not set(far_ranks()) & set(before)
    until(lambda: not far_ranks(), 10.0, "a rank outlived its server")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_on_another_machine_is_lost(cluster, checkpoint, number):
    with serving(checkpoint, "--tensor-parallel-size") as server:
        url = server.wait_ready()
        expected = answers(url, PROMPTS)
        (rank,) = far_ranks()
        limit = LIMIT + (STEP if number == signal.SIGSTOP else 0.0)
        check_loss(server, url, lambda: os.kill(rank, number), expected, limit)
        until(lambda: is_ready(url), 120.0, "it did not serve again")
        assert answers(url, PROMPTS) == expected
    until(lambda: not far_ranks(), 10.0, "a rank outlived its server")


def test_the_server_is_killed(cluster, checkpoint):
    with serving(checkpoint, "--tensor-parallel-size") as server:
        server.wait_ready()
        assert far_ranks()
        server.signal(signal.SIGKILL)
        until(lambda: not far_ranks(), 10.0, "a rank outlived its server")
