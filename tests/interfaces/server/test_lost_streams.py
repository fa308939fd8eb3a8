"""A rank is killed while many stream, behind several copies of the engine or several processes of the server: each
client that has lost something is told so once, and nobody else hears of it."""

import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest
from tests.support.completion_clients import children_of, owner_of
from tests.support.rank_processes import ancestors, ranks_of
from tests.support.server_process import ServerProcess

from quire.testing.tiny_checkpoints import make_checkpoint

NUM_CLIENTS = 8
NUM_TOKENS = 60
SLOW = "before_execute:slow:1:0:seconds=0.05"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("lost"), "qwen3")


def serving(model, *options):
    command = [
        "-m", "quire", "serve", str(model), "--port", "0", "--tensor-parallel-size", "2", "--num-threads", "1",
        "--kv-cache-memory-bytes", str(16 << 20), "--device", "cpu", *options,
    ]  # fmt: skip
    return ServerProcess(command, {"OMP_NUM_THREADS": "1", "QUIRE_FAIL": SLOW})


class Client(threading.Thread):
    """A stream: its tokens, and what it was told of failures, be it before its first token or behind it."""

    def __init__(self, url, number):
        super().__init__(daemon=True)
        self._address = url.removeprefix("http://")
        self._prompt = [number + 3] * 20
        self.port = 0
        self.num_tokens = 0
        self.errors = []
        self.is_closed = False
        self.start()

    def run(self):
        body = {"prompt": self._prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "logprobs": 0}
        # a connection of its own, so that it may be any process's
        connection = http.client.HTTPConnection(self._address, timeout=60)
        connection.connect()
        self.port = connection.sock.getsockname()[1]
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            self.errors.append(json.loads(answer.read())["error"])
        else:
            self._follow(answer)
        connection.close()

    def _follow(self, answer):
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    self.errors.append(event["error"])
                else:
                    self.num_tokens += sum(
                        len((one["logprobs"] or {"tokens": ()})["tokens"]) for one in event["choices"]
                    )
        # the last chunk came, so it is no connection that has broken
        self.is_closed = True


def until(holds, what, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def ready(url):
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=60) as answer:
            return answer.status == 200
    except urllib.error.HTTPError:
        return False


def all_begun(url):
    clients = [Client(url, number) for number in range(NUM_CLIENTS)]
    until(lambda: all(client.num_tokens for client in clients), "no token came")
    assert not any(client.errors for client in clients)
    return clients


def check_ends(clients):
    """Those that have failed."""
    for client in clients:
        client.join(60)
        assert client.is_closed
        assert (client.num_tokens == NUM_TOKENS) == (not client.errors)
        assert [error["code"] for error in client.errors] in ([], ["engine_restarted"])
    return [client for client in clients if client.errors]


def test_a_rank_of_a_copy_takes_along_the_streams_of_that_copy_alone(model):
    with serving(model, "--data-parallel-size", "2") as server:
        url = server.wait_ready()
        before = ranks_of(server.pid)
        cores = [next(ancestors(rank)) for rank in before]
        assert len(set(cores)) == 2
        clients = all_begun(url)
        os.kill(before[0], signal.SIGKILL)
        failed = check_ends(clients)
        assert 0 < len(failed) < NUM_CLIENTS
        assert ready(url)
        until(lambda: len(ranks_of(server.pid)) == 2 and before[0] not in ranks_of(server.pid), "no other copy")
        assert before[1] in ranks_of(server.pid)


def test_a_rank_behind_several_processes_is_told_to_the_clients_of_each(model):
    with serving(model, "--api-server-count", "2") as server:
        url = server.wait_ready()
        [rank] = ranks_of(server.pid)
        clients = all_begun(url)
        port = int(url.rpartition(":")[2])
        fronts = [server.pid, *children_of(server.pid)]
        while len({owner_of(client.port, port, fronts) for client in clients}) < 2:
            # each process takes some of the connections, sooner or later
            clients += all_begun(url)
        os.kill(rank, signal.SIGKILL)
        assert len(check_ends(clients)) == len(clients)
        # Twenty connections of their own, so that each process has said it.
        until(
            lambda: all(ready(url) for _ in range(20)) and ranks_of(server.pid) not in ([], [rank]),
            "the engine was not started anew",
        )
        for client in [Client(url, number) for number in range(NUM_CLIENTS)]:
            client.join(60)
            assert (client.errors, client.num_tokens) == ([], NUM_TOKENS)
