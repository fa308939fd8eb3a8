"""The life of a server process: starting, signals, a dead engine, a port in use. The engine is a fake."""

import json
import signal
import socket

import httpx2 as httpx
import pytest
from tests.support.server_process import ServerProcess

from quire.errors import OptionError
from quire.interfaces.server.transport.listener import listen

# A server on a fake engine. What it does is said by the second argument.
PROGRAM = """
import asyncio, pathlib, signal, sys, threading
import quire.interfaces.async_llm as room
from quire.errors import CapacityError, EngineDeadError
from quire.interfaces.gateway import run_server
from quire.testing.fake_engine import default_reply, unstarted_engine

folder, behaviour, port, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), eval_options(sys.argv[4])

def make(**engine_options):
    engine = unstarted_engine(pathlib.Path(folder))
    if behaviour == "holds":
        engine.fake.hold(3)

    async def start():
        print("starting", flush=True)
        if behaviour == "too large":
            raise CapacityError("max_model_len=512: does not fit.")
        if behaviour == "dies while loading":
            raise EngineDeadError("the weights are gone")
        await asyncio.Event().wait()

    if behaviour in ("too large", "dies while loading", "never ready"):
        engine.start = start

    def reply(request, index):
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.fake.release)
        if request.prompt_token_ids == list(b"die"):
            asyncio.get_running_loop().call_soon(engine.fake.die, "Traceback ...\\nMemoryError: no more")
        return default_reply(request, index)

    def tokenise(*args, **options):
        print("tokenising", flush=True)
        threading.Event().wait()

    if behaviour == "ends badly":
        engine.shutdown = lambda: print("the engine is ended", flush=True)
    if behaviour == "tokenises":
        engine.renderer.render_prompt = tokenise
    engine.fake.reply_to = reply
    return engine

if behaviour == "ends badly":
    from quire.interfaces.server.http_server import HttpServer

    async def close(server):
        raise AssertionError("a connection in a state that nobody thought of")

    HttpServer.close = close

room.AsyncLLM = make
sys.exit(run_server({}, "127.0.0.1", port, **options))
""".replace("eval_options", "__import__('json').loads")


@pytest.fixture
def start(tmp_path):
    def make(behaviour: str = "serves", port: int = 0, **options: object) -> ServerProcess:
        options = {"crash_reports": str(tmp_path / "reports"), **options}
        return ServerProcess(["-c", PROGRAM, str(tmp_path), behaviour, str(port), json.dumps(options)])

    return make


def is_free(url: str) -> bool:
    host, _, port = url.partition("://")[2].partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


BODY = {"messages": [{"role": "user", "content": "x"}]}


def test_what_a_start_says(start):
    with start() as server:
        url = server.wait_ready()
        line = server.wait_for("curl ")
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        output = server.output
    assert url in line
    assert '"model": "byte-model"' in line
    assert "where the start-up time went" in output
    for phase in ("import", "configure", "HTTP server", "engine", "ready"):
        assert any(row.startswith(phase) and row.count(" s") for row in output.splitlines())
    assert "Traceback" not in output


def test_the_line_to_try_works(start):
    import subprocess

    with start() as server:
        server.wait_ready()
        line = server.wait_for("curl ").strip()
        answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=30).stdout
    assert json.loads(answer)["choices"][0]["message"]["content"].startswith("Answer 0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_open_streams(start, number):
    with start("holds", shutdown_timeout=0.0) as server, httpx.Client(timeout=30) as client:
        url = server.wait_ready()
        with client.stream("POST", url + "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.signal(number)
            rest = [line for line in lines if line]
        assert server.wait() == 0
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["code"] == "service_unavailable"
        assert is_free(url)
        assert "Traceback" not in server.output


def test_a_connection_that_does_nothing_does_not_hold_it(start):
    with start() as server:
        url = server.wait_ready()
        host, _, port = url.partition("://")[2].partition(":")
        with socket.create_connection((host, int(port))) as idle, socket.create_connection((host, int(port))) as half:
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
            server.signal()
            assert server.wait() == 0
            assert idle.recv(1) == b""


def test_an_end_that_fails_in_one_place_goes_on_in_the_others(start):
    with start("ends badly") as server:
        server.wait_ready()
        server.signal()
        assert server.wait() == 0
        output = server.output
    assert "HTTP server: its end failed; the end of the server goes on" in output
    assert "a connection in a state that nobody thought of" in output
    assert "the engine is ended" in output


@pytest.mark.parametrize("ending", ["finished", "second signal"])
def test_running_requests_may_finish(start, ending):
    with start("holds", shutdown_timeout=60.0) as server, httpx.Client(timeout=30) as client:
        url = server.wait_ready()
        with client.stream("POST", url + "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.signal()
            # while it drains, new requests are refused and the process is alive
            while (ready := client.get(url + "/health/ready")).status_code == 200:
                pass
            assert ready.status_code == 503
            refused = client.post(url + "/v1/chat/completions", json=BODY)
            assert refused.status_code == 503
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
            assert client.get(url + "/health/live").status_code == 200
            server.signal(signal.SIGUSR1 if ending == "finished" else signal.SIGTERM)
            rest = [line for line in lines if line]
        assert server.wait() == 0
        assert rest[-1] == "data: [DONE]"
        assert ('"finish_reason":"stop"' in rest[-2]) == (ending == "finished")
        assert ('"error"' in rest[-2]) == (ending == "second signal")


def test_a_text_that_is_tokenised_holds_neither_the_server_nor_its_end(start):
    with start("tokenises", shutdown_timeout=0.0) as server:
        url = server.wait_ready()
        host, _, port = url.partition("://")[2].partition(":")
        body = json.dumps({"prompt": "a" * 3000}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            server.wait_for("tokenising")
            assert httpx.get(url + "/health/live").status_code == 200
            server.signal()
            assert server.wait() == 0
            assert connection.recv(9999).startswith(b"HTTP/1.1 503 ")
        assert is_free(url)
        assert "Traceback" not in server.output
        assert "running task" not in server.output


def until_ready(client: httpx.Client, url: str) -> None:
    while (answer := client.get(url + "/health/ready")).status_code != 200:
        assert answer.headers["retry-after"] == "1"


def test_an_engine_that_dies_is_started_again(start, tmp_path):
    with start() as server, httpx.Client(timeout=30) as client:
        url = server.wait_ready()
        for _ in range(2):
            response = client.post(url + "/v1/completions", json={"prompt": "die"})
            assert (response.status_code, response.headers["retry-after"]) == (500, "1")
            assert response.json()["error"]["code"] == "engine_restarted"
            assert client.get(url + "/health/live").status_code == 200
            assert client.get(url + "/health/startup").status_code == 200
            until_ready(client, url)
            answer = client.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 30})
            assert answer.json()["choices"][0]["text"].startswith("Answer 0 to 1 tokens")
        metrics = client.get(url + "/metrics").text
        assert 'quire:engine_restarts_total{model_name="byte-model"} 2.0' in metrics
        assert 'quire:requests_aborted_total{kind="engine_restarted",model_name="byte-model"} 2.0' in metrics
        server.signal()
        assert server.wait() == 0
        assert server.output.count("MemoryError: no more") == 2
        assert len(list((tmp_path / "reports").iterdir())) == 2


def test_an_engine_that_dies_too_often_ends_the_process_with_70(start):
    with start(max_engine_restarts=1) as server, httpx.Client(timeout=30) as client:
        url = server.wait_ready()
        client.post(url + "/v1/completions", json={"prompt": "die"})
        until_ready(client, url)
        assert client.post(url + "/v1/completions", json={"prompt": "die"}).status_code == 500
        assert server.wait() == 70
        last = server.output.strip().splitlines()[-1]
        assert "the engine died" in last
        assert "MemoryError: no more" in last
        assert is_free(url)


def test_a_dead_engine_that_is_not_to_be_restarted_ends_the_process_with_70(start):
    with start(max_engine_restarts=0) as server, httpx.Client(timeout=30) as client:
        url = server.wait_ready()
        response = client.post(url + "/v1/completions", json={"prompt": "die"})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_restarted"
        assert server.wait() == 70
        (line,) = [line for line in server.output.splitlines() if "the engine died" in line]
        assert "MemoryError: no more" in line
        assert is_free(url)


def test_a_stream_hears_that_the_engine_died(start):
    with start(max_engine_restarts=0) as server, httpx.Client(timeout=30) as client:
        url = server.wait_ready()
        body = {"prompt": ["x", "die"], "stream": True, "max_tokens": 400, "ignore_eos": True}
        lines = [line for line in client.post(url + "/v1/completions", json=body).text.splitlines() if line]
        assert "error" in lines[-1] or lines[-1] == "data: [DONE]"
        assert sum('"engine_restarted"' in line for line in lines) == 1
        assert server.wait() == 70


def test_while_it_loads(start):
    with start("never ready") as server, socket.create_server(("127.0.0.1", 0)) as reserved:
        server.wait_for("starting")
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output
        assert reserved is not None


def test_health_while_it_loads(start):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with start("never ready", port) as server, httpx.Client(timeout=30) as client:
        server.wait_for("starting")
        # the socket listens already, so the answer comes as soon as there is somebody to give it
        assert client.get(url + "/health/live").status_code == 200
        assert client.get(url + "/health").status_code == 503
        assert client.get(url + "/health/startup").status_code == 503
        response = client.post(url + "/v1/chat/completions", json=BODY)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        server.signal()
        assert server.wait() == 0


def test_a_folder_for_files_that_takes_none_ends_the_start(start, tmp_path):
    (tmp_path / "taken").touch()
    with start("never ready", files_folder=str(tmp_path / "taken" / "below")) as server:
        assert server.wait() != 0
        last = server.output.strip().splitlines()[-1]
        assert "below: nothing can be stored there (Not a directory). Give a folder" in last
        assert "starting" not in server.output


def test_a_port_in_use_is_found_at_once(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start("never ready", port) as server:
            assert server.wait() != 0
            last = server.output.strip().splitlines()[-1]
            assert f"port={port}: in use on 127.0.0.1" in last
            assert "--port" in last
            assert "starting" not in server.output


def test_a_port_for_administration_in_use_is_called_so():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"^admin_port={port}: in use .*--admin-port "):
            listen("127.0.0.1", port, "admin_")


def test_two_servers_cannot_share_a_port(start):
    with start() as first:
        port = int(first.wait_ready().rpartition(":")[2])
        with start("serves", port) as second:
            assert second.wait() != 0
            assert "in use" in second.output


def test_what_cannot_work_is_said_once(start):
    with start("too large") as server:
        assert server.wait() not in (0, 70)
        assert server.output.strip().splitlines()[-1].endswith("max_model_len=512: does not fit.")


def test_an_unknown_option_of_the_server(start):
    with start(api_key="x") as server:
        assert server.wait() != 0
        assert 'Did you mean "api_keys"?' in server.output.strip().splitlines()[-1]


def test_an_engine_that_dies_while_loading(start):
    with start("dies while loading") as server:
        assert server.wait() == 70
        assert "the engine died: the weights are gone" in server.output
        assert "Traceback" not in server.output
