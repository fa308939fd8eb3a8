"""The example of a server on the bare engine client runs as it stands (4.1.2)."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_server.py"


def test_tokens_in_tokens_out_over_a_plain_socket() -> None:
    with subprocess.Popen([sys.executable, str(EXAMPLE), "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline().rsplit(":", 1)[1])
            with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as stream:
                stream.write(json.dumps({"tokens": [10, 20, 30], "count": 5}) + "\n")
                stream.flush()
                received: list[int] = []
                while True:
                    answer = json.loads(stream.readline())
                    received += answer["tokens"]
                    if answer["end"]:
                        break
            assert len(received) == 5
            assert answer["end"] == "length"
        finally:
            server.send_signal(signal.SIGINT)
