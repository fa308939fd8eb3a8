"""A server whose engine has two ranks, one of which is killed: an error for who waits, and a new engine."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest
from tests.support.rank_processes import ranks_of
from tests.support.server_process import ServerProcess

from quire.testing.tiny_checkpoints import make_checkpoint


@pytest.fixture
def server(tmp_path):
    model = make_checkpoint(tmp_path, "qwen3")
    command = [
        "-m", "quire", "serve", str(model), "--port", "0", "--tensor-parallel-size", "2", "--num-threads", "1",
        "--kv-cache-memory-bytes", str(16 << 20), "--device", "cpu",
    ]  # fmt: skip
    with ServerProcess(
        command, {"OMP_NUM_THREADS": "1", "QUIRE_FAIL": "before_execute:slow:1:0:seconds=0.1"}
    ) as process:
        yield process


def ask(url, body):
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


def is_ready(url):
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=60) as answer:
            return answer.status == 200
    except urllib.error.HTTPError:
        return False


def test_a_rank_that_is_killed_while_nobody_asks_costs_no_request(server):
    url = server.wait_ready()
    (rank,) = ranks_of(server.pid)
    os.kill(rank, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not is_ready(url) or ranks_of(server.pid) in ([], [rank]):
        assert time.monotonic() < deadline, "the engine was not started anew"
        time.sleep(0.1)
    with ask(url, {"prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0}) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4


def test_a_killed_rank_is_an_error_for_who_waits_and_the_engine_comes_back(server):
    url = server.wait_ready()
    (rank,) = ranks_of(server.pid)
    lines = []
    has_begun = threading.Event()

    def read():
        with ask(url, {"prompt": [3, 4, 5], "max_tokens": 240, "ignore_eos": True, "stream": True}) as answer:
            for line in answer:
                lines.append(line.decode())
                has_begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert has_begun.wait(60)
    os.kill(rank, signal.SIGKILL)
    killed_at = time.monotonic()
    reader.join(30)
    assert not reader.is_alive()
    assert any('"error"' in line for line in lines), lines[-3:]
    while not is_ready(url):
        assert time.monotonic() - killed_at < 90
        time.sleep(0.1)
    assert ranks_of(server.pid) not in ([], [rank])
    with ask(url, {"prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0}) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4
