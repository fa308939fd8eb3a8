"""A real server on the embedded model, and a way to ask it anything."""

import contextlib
import http.client
from urllib.parse import urlsplit

import pytest
from tests.support.server_process import ServerProcess

MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def server():
    command = ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--max-model-len", str(MAX_MODEL_LEN)]
    with ServerProcess([*command, "--num-threads", "1"]) as process:
        process.address = urlsplit(process.wait_ready()).netloc
        yield process


@pytest.fixture(scope="session")
def ask(server):
    """Status, headers and body of an answer; headers may hold anything."""

    def ask(method, path, body, headers):
        connection = http.client.HTTPConnection(server.address, timeout=20)
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value.encode("utf-8"))
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            # it may be refused before all of it was sent
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(body)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    return ask
