"""The example of a server on the bare engine client runs as it stands (4.1.2)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_server.py"
BAD_LINES = {
    "no json": "expecting value",
    '{"tokens": [10]}': "count",
    "[1]": "indices",
    '{"tokens": "abc", "count": 5}': "whole number",
    '{"tokens": [10], "count": 0}': "max_tokens",
    '{"tokens": [99999], "count": 5}': "between 0 and",
}


def test_tokens_in_errors_out_and_its_end() -> None:
    command = [sys.executable, str(EXAMPLE), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            port = int(server.stdout.readline().rsplit(":", 1)[1])
            with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as stream:

                def ask(line: str) -> dict[str, object]:
                    stream.write(line + "\n")
                    stream.flush()
                    received: list[int] = []
                    while True:
                        answer = json.loads(stream.readline())
                        received += answer["tokens"]
                        if answer["end"]:
                            return {**answer, "tokens": received}

                for line, words in BAD_LINES.items():
                    answer = ask(line)
                    assert answer["end"] == "error"
                    assert words in str(answer["error"]).lower()
                answer = ask('{"tokens": [10, 20, 30], "count": 5}')
                assert len(answer["tokens"]) == 5  # type: ignore[arg-type]
                assert answer["end"] == "length"
            [engine] = [
                child for child in psutil.Process(server.pid).children() if "process" in " ".join(child.cmdline())
            ]
            os.kill(engine.pid, signal.SIGKILL)
            assert server.wait(30) == 1
            assert "the engine died" in server.stderr.read()
        finally:
            server.kill()
