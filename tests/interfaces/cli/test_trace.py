"""quire trace: what a server recorded, saved as a file; mistakes are one line."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.support.recordings import recording_of

from quire.interfaces.cli.program import main
from quire.observability.perfetto import perfetto_trace
from quire.observability.recorder import DecisionRecorder
from quire.testing.core import CoreUnderTest


@pytest.fixture(scope="module")
def trace() -> bytes:
    core = CoreUnderTest(recorder=DecisionRecorder(1 << 20, lambda: 1.0))
    core.add(1, [1, 2, 3], max_tokens=3)
    core.run()
    return json.dumps(perfetto_trace(recording_of(core))).encode()


@pytest.fixture
def server(trace: bytes):
    """Answers like a server with the key `right`."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            is_allowed = self.headers["authorization"] == "Bearer right"
            body = trace if is_allowed else json.dumps({"error": {"message": "The API key is not valid."}}).encode()
            self.send_response(200 if is_allowed else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("end", ["", "/", "/v1"])
def test_a_trace_is_saved(server, trace: bytes, tmp_path: Path, capsys, end: str):
    url, asked = server
    path = tmp_path / "trace.json"
    assert main(["trace", "--url", url + end, "-o", str(path), "--api-key", "right"]) == 0
    assert path.read_bytes() == trace
    assert asked == ["/v1/observe/trace"]
    assert "ui.perfetto.dev" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, status, says",
    [
        (["--api-key", "wrong"], 1, "the server answered 401: The API key is not valid."),
        (["--api-key", "right", "-o", "/nowhere/x.json"], 2, "--output /nowhere/x.json"),
        (["--url", "localhost:8000"], 2, "must be an address such as http://127.0.0.1:8000"),
        (["--url", "file:///etc/passwd"], 2, "must be an address"),
        (["--url", "http://127.0.0.1:1"], 1, "Is the server running there?"),
    ],
)
def test_a_mistake_is_one_line(server, arguments: list[str], status: int, says: str, capsys):
    url, _ = server
    given = arguments if "--url" in arguments else ["--url", url, *arguments]
    assert main(["trace", *given]) == status
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
