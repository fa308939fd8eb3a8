"""A server with two copies of the engine, one of which is killed while requests run."""

import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.support.server_process import ServerProcess

NUM_REQUESTS = 24


def cores_of(server_pid):
    """Processes of engine cores that the server has started."""
    found = []
    for name in os.listdir("/proc"):
        try:
            command = Path(f"/proc/{name}/cmdline").read_text()
            parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if "engine_core.process" in command and int(parent) == server_pid:
            found.append(int(name))
    return sorted(found)


def ask(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(url, name):
    """The sum of its samples."""
    text = ask(url, "/metrics")[1]
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? ([0-9.e+]+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    reports = str(tmp_path_factory.mktemp("reports"))
    command = ["-m", "quire", "serve", "--port", "0", "--data-parallel-size", "2", "--device", "cpu",
               "--num-gpu-blocks-override", "500", "--crash-reports", reports]  # fmt: skip
    slow = "before_execute:slow:1:0:seconds=0.02"
    with ServerProcess(command, {"OMP_NUM_THREADS": "1", "QUIRE_FAIL": slow}) as process:
        yield process


def test_two_copies_share_the_requests(server):
    url = server.wait_ready()
    assert len(cores_of(server.pid)) == 2
    body = {"prompt": [5, 6, 7] * 20, "max_tokens": 8, "temperature": 0}
    answers = [ask(url, "/v1/completions", body) for _ in range(4)]
    assert len({json.loads(text)["choices"][0]["text"] for _, text in answers}) == 1
    assert (metric(url, "quire:replicas"), metric(url, "quire:replicas_serving")) == (2, 2)
    assert metric(url, "quire:kv_cache_blocks") == 1000
    # all but the first found what that one had computed, and were sent there
    assert metric(url, "quire:prefix_cache_hits_total") == 3 * 48


def test_a_session_stays_with_its_copy(server):
    url = server.wait_ready()
    sessions = [json.loads(ask(url, "/v1/sessions", {})[1])["id"] for _ in range(3)]
    for _ in range(2):
        for session in sessions:
            body = {"messages": [{"role": "user", "content": "What is a block?"}], "max_tokens": 8, "temperature": 0}
            status, text = ask(url, f"/v1/sessions/{session}/messages", body)
            assert status == 200, text
    assert json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_killed_copy_takes_along_only_what_had_begun(server):
    url = server.wait_ready()
    session = json.loads(ask(url, "/v1/sessions", {})[1])["id"]
    turn = {"messages": [{"role": "user", "content": "What is a block?"}], "max_tokens": 8, "temperature": 0}
    assert ask(url, f"/v1/sessions/{session}/messages", turn)[0] == 200
    answers = {}

    def request(number):
        body = {"prompt": [number + 3, 9] * 20, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        answers[number] = ask(url, "/v1/completions", body)

    threads = [threading.Thread(target=request, args=(number,)) for number in range(NUM_REQUESTS)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    # all have begun, and none has ended
    while metric(url, "quire:replica_sequences") < NUM_REQUESTS or metric(url, "quire:replica_waiting_tokens"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    before = cores_of(server.pid)
    os.kill(before[0], signal.SIGKILL)
    statuses = set()
    while metric(url, "quire:replicas_serving") == 2:
        assert time.monotonic() < deadline
    statuses.add(ask(url, "/health/ready")[0])
    for thread in threads:
        thread.join()
    failed = [text for status, text in answers.values() if status != 200]
    assert 0 < len(failed) < NUM_REQUESTS
    assert {json.loads(text)["error"]["code"] for text in failed} == {"engine_restarted"}
    while metric(url, "quire:replicas_serving") < 2:
        statuses.add(ask(url, "/health/ready")[0])
        assert time.monotonic() < deadline, server.output
        time.sleep(0.1)
    # the other one served all the while
    assert statuses == {200}
    assert metric(url, "quire:engine_deaths_total") == metric(url, "quire:engine_restarts_total") == 1
    after = cores_of(server.pid)
    assert (len(after), before[1] in after) == (2, True)
    assert ask(url, f"/v1/sessions/{session}/messages", turn)[0] == 200


def test_all_copies_killed_is_the_engine_dead_and_started_again(server):
    url = server.wait_ready()
    before = cores_of(server.pid)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (
        ask(url, "/health/ready")[0] != 200
        or set(cores_of(server.pid)) & set(before)
        or (len(cores_of(server.pid)) < 2)
    ):
        assert time.monotonic() < deadline, server.output
        time.sleep(0.1)
    assert ask(url, "/v1/completions", {"prompt": [3, 4], "max_tokens": 2})[0] == 200


def test_two_processes_in_front_of_two_copies(tmp_path):
    command = ["-m", "quire", "serve", "--port", "0", "--data-parallel-size", "2", "--api-server-count", "2",
               "--device", "cpu", "--num-gpu-blocks-override", "500", "--crash-reports", str(tmp_path)]  # fmt: skip
    with ServerProcess(command, {"OMP_NUM_THREADS": "1"}) as server:
        url = server.wait_ready()
        deadline = time.monotonic() + 300
        body = {"prompt": [5, 6, 7] * 20, "max_tokens": 8, "temperature": 0}
        status, expected = ask(url, "/v1/completions", body)
        assert status == 200
        text = json.loads(expected)["choices"][0]["text"]

        def answers_from_both():
            """Until each process has answered, on connections that the system gives to either."""
            begin = len(server.output)
            lines = [f"access{process}: POST /v1/completions 200" for process in ("", " [process 1]")]
            while not all(line in server.output[begin:] for line in lines):
                assert time.monotonic() < deadline, server.output
                status, answer = ask(url, "/v1/completions", body)
                # one that has not met the successor yet when the other copy dies has none for a moment
                assert status == 503 or (status, json.loads(answer)["choices"][0]["text"]) == (200, text)

        answers_from_both()
        # each counts its own requests, and the first one the copies
        assert (metric(url, "quire:replicas"), metric(url, "quire:replicas_serving")) == (2, 2)
        # The older one: the second time that leaves the one which has taken the place of the first.
        for _ in range(2):
            before = cores_of(server.pid)
            os.kill(before[0], signal.SIGKILL)
            while metric(url, "quire:replicas_serving") == 2:
                assert time.monotonic() < deadline
            answers_from_both()
            while metric(url, "quire:replicas_serving") < 2 or len(cores_of(server.pid)) < 2:
                assert time.monotonic() < deadline, server.output
                time.sleep(0.1)
            answers_from_both()
        assert "has no engine" not in server.output
