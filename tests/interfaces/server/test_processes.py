"""Several processes in front of one engine: who answers, who dies, what holds for all. The core is a fake one."""

import http.client
import json
import os
import re
import signal
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.completion_clients import children_of, owner_of
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks into /proc")

# SIGUSR1: sequences stand still at three tokens; SIGUSR2: they go on.
PROGRAM = """
import asyncio, json, signal, sys
import quire.interfaces.async_llm as room
from quire.engine_client import AsyncEngineClient
from quire.interfaces.gateway import run_server
from quire.testing.fake_llm import fake_config, fake_link, fake_renderer

def make(**options):
    def connect(config):
        return AsyncEngineClient(fake_link(own_process=True, core="quire.testing.fake_kept:build"))

    engine = room_AsyncLLM.from_config(fake_config(), renderer=fake_renderer())
    engine._connect = connect
    start = engine.start

    async def start_and_listen():
        ready = await start()
        def hold(**args):
            asyncio.ensure_future(engine.control("hold", args))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: hold(at=3))
        loop.add_signal_handler(signal.SIGUSR2, hold)
        engine.start = start
        return ready

    engine.start = start_and_listen
    return engine

room_AsyncLLM, room.AsyncLLM = room.AsyncLLM, make
from quire.interfaces.gateway.processes import fleet
fleet._LOOK_SECONDS = float(sys.argv[2])
sys.exit(run_server({}, "127.0.0.1", 0, **json.loads(sys.argv[1])))
"""
COMPLETION = {"prompt": [5, 6, 7], "max_tokens": 30, "temperature": 0, "ignore_eos": True}


class Server:
    """Two processes, and connections to the one that is wanted."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.port = int(process.wait_ready().rpartition(":")[2])

    @property
    def others(self) -> list[int]:
        """Process ids beside the first one's and the engine's."""
        return [pid for pid in children_of(self.process.pid) if b"processes.member" in command_of(pid)]

    @property
    def engine(self) -> int:
        return next(pid for pid in children_of(self.process.pid) if b"engine_core.process" in command_of(pid))

    @contextmanager
    def standing_still(self, pid: int):
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: state_of(pid) == "T")
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def connect(self, pid: int) -> http.client.HTTPConnection:
        """To the process `pid`: it alone can take connections meanwhile."""
        [other] = {self.process.pid, *self.others} - {pid}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with self.standing_still(other):
            connection.connect()
            until(lambda: self.owner_of(connection) == pid)
        return connection

    def owner_of(self, connection: http.client.HTTPConnection) -> int | None:
        return owner_of(connection.sock.getsockname()[1], self.port, [self.process.pid, *self.others])

    def metric(self, name: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        text = ask(connection, "GET", "/metrics")[1]
        connection.close()
        found = re.findall(rf"^quire:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def tenant(self) -> dict[str, int]:
        """The report of the only one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        [report] = json.loads(ask(connection, "GET", "/v1/admin/tenants")[1])["data"]
        connection.close()
        return report

    def hold(self) -> None:
        self.process.signal(signal.SIGUSR1)

    def release(self) -> None:
        self.process.signal(signal.SIGUSR2)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def ask(connection, method: str, path: str, body=None, **headers) -> tuple[int, str]:
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, {"content-type": "application/json", **headers})
    response = connection.getresponse()
    return response.status, response.read().decode()


class Stream:
    """A completion on its way."""

    def __init__(self, connection, **headers) -> None:
        body = json.dumps({**COMPLETION, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **headers})
        self.response = connection.getresponse()
        self.status = self.response.status
        self.first = self.response.readline()

    def rest(self) -> str:
        return self.response.read().decode()


def text_of(stream: Stream) -> str:
    lines = (stream.first.decode() + stream.rest()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "data: [DONE]" in lines
    return "".join(event["choices"][0]["text"] for event in events)


@contextmanager
def a_server(tmp_path, look_seconds: float = 30.0, **options):
    told = {"api_server_count": 2, "crash_reports": str(tmp_path), "storage_url": "sqlite:///:memory:", **options}
    with ServerProcess(["-c", PROGRAM, json.dumps(told), str(look_seconds)]) as process:
        server = Server(process)
        yield server
    assert "Traceback" not in process.output


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with a_server(tmp_path_factory.mktemp("server")) as server:
        yield server


def on_each(server: Server) -> list[Stream]:
    return [Stream(server.connect(pid)) for pid in (server.process.pid, *server.others)]


def until_two_serve(server: Server) -> None:
    until(lambda: server.metric("api_processes") == 2)


def test_both_answer_and_count_together(server):
    [other] = server.others
    before = server.metric("generation_tokens_total")
    streams = on_each(server)
    texts = {text_of(stream) for stream in streams}
    assert len(texts) == 1
    # either of them is asked, and shows what both have counted
    for pid in (server.process.pid, other):
        _, text = ask(server.connect(pid), "GET", "/metrics")
        [line] = [line for line in text.splitlines() if line.startswith("quire:generation_tokens_total")]
        assert float(line.rpartition(" ")[2]) == before + 60
        assert "quire:api_processes{" in text
        assert "quire:num_requests_running" in text


def test_what_is_kept_is_the_first_ones(server):
    [other] = server.others
    connection = server.connect(other)
    assert ask(connection, "GET", "/v1/models")[0] == 200
    assert server.owner_of(connection) == other
    for _ in range(12):
        # the body comes a moment after the head, in the hands of the first process
        again = server.connect(other)
        assert ask(again, "POST", "/v1/tokenize", {})[0] == 404
        again.close()
    status, text = ask(connection, "POST", "/v1/sessions", {})
    assert (status, server.owner_of(connection)) == (201, server.process.pid)
    # it stays there, and sees what it has made
    session = json.loads(text)["id"]
    assert ask(connection, "GET", f"/v1/sessions/{session}")[0] == 200
    assert ask(connection, "POST", "/v1/completions", COMPLETION)[0] == 200
    # and so does another one, from wherever it comes
    for pid in (other, server.process.pid):
        again = server.connect(pid)
        assert ask(again, "GET", f"/v1/sessions/{session}")[0] == 200
    assert ask(again, "DELETE", f"/v1/sessions/{session}")[0] == 200
    response = ask(server.connect(other), "POST", "/v1/responses", {"input": [], "background": True})
    assert response[0] == 400
    assert ask(server.connect(other), "GET", "/nowhere")[0] == 404


def test_a_first_line_in_pieces_and_a_body_that_came_with_it(server):
    [other] = server.others
    connection = server.connect(other)
    body = b"{}"
    head = b"POST /v1/sessions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sock.sendall(head[:9])
    until(lambda: unread_of(connection, server.port) == 0)
    connection.sock.sendall(head[9:] + b"content-length: %d\r\n\r\n" % len(body) + body)
    response = http.client.HTTPResponse(connection.sock)
    response.begin()
    assert response.status == 201
    assert ask(server.connect(other), "DELETE", f"/v1/sessions/{json.loads(response.read())['id']}")[0] == 200


def unread_of(connection, server_port: int) -> int:
    """Bytes that the server has not taken from the system."""
    wanted = (f"{server_port:04X}", f"{connection.sock.getsockname()[1]:04X}")
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if (fields[1].partition(":")[2], fields[2].partition(":")[2]) == wanted:
            return int(fields[4].partition(":")[2], 16)
    raise AssertionError("the connection is gone")


def test_what_comes_behind_another_request_is_told_to_come_alone(server):
    [other] = server.others
    connection = server.connect(other)
    connection.sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /v1/sessions HTTP/1.1\r\nhost: x\r\n\r\n")
    answers = b""
    while data := connection.sock.recv(65536):
        answers += data
    first, _, second = answers.partition(b"HTTP/1.1 421")
    assert first.startswith(b"HTTP/1.1 200")
    assert b"misdirected_request" in second


def test_one_that_is_killed_takes_only_its_own_with_it(server):
    [other] = server.others
    deaths, tokens = server.metric("api_process_deaths_total"), server.metric("generation_tokens_total")
    server.hold()
    until(lambda: server.metric("num_requests_running") == 0)
    mine, theirs = on_each(server)
    until(lambda: server.metric("num_requests_running") == 2)
    seen = server.tenant()
    assert (seen["num_requests"], seen["num_accepted"] > 1) == (2, True)
    os.kill(other, signal.SIGKILL)
    until(lambda: server.metric("num_requests_running") == 1)  # its request was aborted in the core
    # what it had in use is free, what it had counted stays
    until(lambda: server.tenant()["num_requests"] == 1)
    assert server.tenant()["num_accepted"] == seen["num_accepted"]
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        theirs.rest()
    server.release()
    assert len(text_of(mine)) > 30
    until_two_serve(server)
    assert server.metric("api_process_deaths_total") == deaths + 1
    # counters do not fall: what it had counted at the last look is still in the sum
    assert server.metric("generation_tokens_total") >= tokens + 30
    [again] = server.others
    assert again != other
    assert len({text_of(stream) for stream in on_each(server)}) == 1


def test_one_that_is_asked_to_end_ends_its_requests_first_and_takes_no_new_ones(server):
    [other] = server.others
    deaths = server.metric("api_process_deaths_total")
    set_log_level(server, "debug")
    server.hold()
    until(lambda: server.metric("num_requests_running") == 0)
    tokens, accepted = server.metric("generation_tokens_total"), server.tenant()["num_accepted"]
    streams = on_each(server)
    os.kill(other, signal.SIGTERM)
    until(lambda: not listens(other, server.port))
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        assert ask(connection, "GET", "/health/ready")[0] == 200
        assert server.owner_of(connection) == server.process.pid
    server.release()
    assert len({text_of(stream) for stream in streams}) == 1
    until(lambda: server.others not in ([], [other]))
    until_two_serve(server)
    assert server.metric("api_process_deaths_total") == deaths
    # nobody had asked it since: it has told itself what it had counted
    assert server.metric("generation_tokens_total") == tokens + 60
    assert server.tenant()["num_accepted"] == accepted + 2
    # the new one logs what the others log
    [new] = server.others
    ask(server.connect(new), "GET", "/health/live", **{"x-request-id": "at-the-new-one"})
    assert "[process 1]: GET /health/live 200" in server.process.wait_for("at-the-new-one")
    set_log_level(server, "info")


def set_log_level(server: Server, level: str) -> None:
    assert ask(server.connect(server.process.pid), "PUT", "/v1/admin/log_level", {"level": level})[0] == 200


def listens(pid: int, port: int) -> bool:
    """Whether the listening socket is open there."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[1].endswith(f":{port:04X}"):
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
            return f"socket:[{fields[9]}]" in links
    return False


def test_an_engine_that_dies_is_told_to_all_and_comes_back_for_all(server):
    server.hold()
    streams = on_each(server)
    until(lambda: server.metric("num_requests_running") == 2)
    os.kill(server.engine, signal.SIGKILL)
    for stream in streams:
        assert '"code":"engine_restarted"' in stream.rest()
    until_two_serve(server)
    assert len({text_of(stream) for stream in on_each(server)}) == 1
    [other] = server.others
    assert ask(server.connect(other), "GET", "/health/ready")[0] == 200


@pytest.mark.nightly
def test_bounds_hold_for_both_together(tmp_path):
    key = {"authorization": "Bearer secret-of-a-tenant"}
    keys = tmp_path / "keys"
    keys.write_text("tenant: secret-of-a-tenant max_requests=3\n")
    keys.chmod(0o600)
    with a_server(tmp_path, api_key_file=str(keys), shutdown_timeout=0.0) as server:
        [other] = server.others
        # a process that is started later knows the keys that the others know
        keys.unlink()
        server.hold()
        held = [Stream(server.connect(pid), **key) for pid in (server.process.pid, other, other)]
        assert [stream.status for stream in held] == [200, 200, 200]
        for pid in (server.process.pid, other):
            status, text = ask(server.connect(pid), "POST", "/v1/completions", COMPLETION, **key)
            assert (status, "3 requests in flight" in text) == (429, True)
        # what a dead process had in use is free
        os.kill(other, signal.SIGKILL)
        server.process.wait_for("process 1 ended")
        until(lambda: len(server.others) == 1)
        free = [Stream(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60), **key) for _ in range(2)]
        assert [stream.status for stream in free] == [200, 200]


@pytest.mark.nightly
def test_one_that_stands_still_is_killed(tmp_path):
    with a_server(tmp_path, look_seconds=0.5) as server:
        [other] = server.others
        os.kill(other, signal.SIGSTOP)
        server.process.wait_for("stands still for 3 s and is killed")
        until(lambda: server.others not in ([], [other]))
        until_two_serve(server)


@pytest.mark.parametrize(
    "ending",
    ["finished", *(pytest.param(ending, marks=pytest.mark.nightly) for ending in ("second signal", "at once"))],
)
def test_a_signal_drains_all(tmp_path, ending):
    with a_server(tmp_path, shutdown_timeout=0.0 if ending == "at once" else 60.0) as server:
        server.hold()
        streams, pids = on_each(server), [*server.others, server.engine]
        connections = [server.connect(pid) for pid in (server.process.pid, *server.others)]
        server.process.signal(signal.SIGTERM)
        if ending != "at once":
            for connection in connections:
                until(lambda connection=connection: is_refused(connection))
            server.process.signal(signal.SIGUSR2 if ending == "finished" else signal.SIGTERM)
        rests = [stream.rest() for stream in streams]
        assert server.process.wait() == 0
        for rest in rests:
            assert ('"finish_reason":"length"' in rest) == (ending == "finished")
            assert ('"code":"service_unavailable"' in rest) == (ending != "finished")
            assert "data: [DONE]" in rest
        assert all(not command_of(pid) for pid in pids)


def is_refused(connection) -> bool:
    return ask(connection, "GET", "/health/ready")[0] == 503


def test_all_end_with_the_first(tmp_path):
    with a_server(tmp_path) as server:
        pids = [*server.others, server.engine]
        server.process.signal(signal.SIGKILL)
        assert server.process.wait() == -signal.SIGKILL
        until(lambda: all(not command_of(pid) for pid in pids))
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) != 0


@pytest.mark.nightly
def test_an_engine_that_died_too_often_ends_all(tmp_path):
    with a_server(tmp_path, max_engine_restarts=0) as server:
        pids = [*server.others, server.engine]
        server.hold()
        streams = on_each(server)
        os.kill(server.engine, signal.SIGKILL)
        assert all('"code":"engine_restarted"' in stream.rest() for stream in streams)
        assert server.process.wait() == 70
        assert all(not command_of(pid) for pid in pids)
