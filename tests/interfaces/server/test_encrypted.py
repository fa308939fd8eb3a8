"""TLS and Unix sockets, with certificates that are made here."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx2 as httpx
import pytest

from quire.errors import OptionError
from quire.interfaces.gateway.app import http_server
from quire.interfaces.gateway.run import check_tls
from quire.interfaces.gateway.welcome import CHAT, welcome
from quire.interfaces.server.life.process import loop_factory
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.transport.listener import listen, listen_at
from quire.interfaces.server.transport.tls import Tls
from quire.testing.fake_engine import fake_engine

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
QUESTION = {"model": "model", "prompt": "one two three", "max_tokens": 4}


def make_pair(folder: Path, name: str) -> tuple[str, str]:
    """A certificate of localhost that has signed itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj".split()
    more = [f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *more, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return str(certificate), str(key)


def name_in(context: ssl.SSLContext, certificate: str) -> str:
    """Whose certificate a new connection gets, if it is this one; raises ssl.SSLError if it is another."""
    client = ssl.create_default_context(cafile=certificate)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        context.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
            if end.getpeercert():
                found = dict(item for [item] in end.getpeercert()["subject"])["commonName"]
    return found


@needs_openssl
def test_a_server_with_a_certificate(tmp_path):
    certificate, key = make_pair(tmp_path, "first")
    options = ServerOptions(storage_url="sqlite:///:memory:", ssl_certfile=certificate, ssl_keyfile=key)

    async def main():
        engine = await fake_engine(tmp_path / "model")
        with listen("127.0.0.1", 0) as listener:
            server = http_server(options, listener, None)
            server.attach(engine)
            server.start()
            port = listener.getsockname()[1]
            context = ssl.create_default_context(cafile=certificate)
            async with httpx.AsyncClient(verify=context, base_url=f"https://localhost:{port}") as client:
                name = (await client.get("/v1/models")).json()["data"][0]["id"]
                body = {**QUESTION, "model": name}
                whole = await client.post("/v1/completions", json=body)
                assert whole.status_code == 200, whole.text
                streamed = await client.post("/v1/completions", json={**body, "stream": True})
                assert streamed.text.endswith("data: [DONE]\n\n")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            # nothing is answered in the clear
            assert not (await reader.read()).startswith(b"HTTP")
            writer.close()
            await server.close()
        engine.shutdown()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(asyncio.wait_for(main(), 60))


@needs_openssl
@pytest.mark.parametrize("loop", [loop_factory(), asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_handshakes_are_unfinished_connections(tmp_path, loop):
    certificate, key = make_pair(tmp_path, "first")
    context = ssl.create_default_context(cafile=certificate)
    options = ServerOptions(
        storage_url="sqlite:///:memory:", ssl_certfile=certificate, ssl_keyfile=key, first_byte_seconds=1.0
    )

    async def main():
        engine = await fake_engine(tmp_path / "model")
        with listen("127.0.0.1", 0) as listener:
            server = http_server(options, listener, None)
            server.attach(engine)
            server.start()
            port = listener.getsockname()[1]
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            while server._unfinished.statistics()["unfinished"] != 3:
                await asyncio.sleep(0.001)
            silent[0][1].close()
            # a request in the packet that ends the handshake, and one after it
            reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
            for _ in range(2):
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            # what is no request is told so
            writer.write(b"nonsense\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
            # those that say nothing are let go
            assert await silent[1][0].read() == b""
            assert await silent[2][0].read() == b""
            while server._unfinished.statistics()["unfinished"]:
                await asyncio.sleep(0.001)
            for _, one in silent:
                one.close()
            await server.close()
            assert server._unfinished._num_open == 0
        engine.shutdown()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(main(), 60))


@needs_openssl
def test_a_new_certificate_is_used_and_a_broken_one_is_not(tmp_path, caplog):
    folder = tmp_path / "new"
    folder.mkdir()
    first, second = make_pair(tmp_path, "first"), make_pair(folder, "second")
    certificate, key = tmp_path / "used.pem", tmp_path / "used.key"
    shutil.copy(first[0], certificate)
    shutil.copy(first[1], key)
    tls = Tls(str(certificate), str(key))
    assert name_in(tls.context, first[0]) == "first"
    # half of the renewal: the key belongs to another certificate
    shutil.copy(second[0], certificate)
    os.utime(certificate, ns=(1, 1))
    tls.look()
    tls.look()
    assert name_in(tls.context, first[0]) == "first"
    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(said) == 1
    assert "stays in use" in said[0]
    # the other half
    shutil.copy(second[1], key)
    tls.look()
    assert name_in(tls.context, second[0]) == "second"
    with pytest.raises(ssl.SSLError):
        name_in(tls.context, first[0])


@needs_openssl
def test_what_cannot_be_used_is_said_before_anything_loads(tmp_path):
    certificate, key = make_pair(tmp_path, "first")
    with pytest.raises(OptionError, match="No such file"):
        check_tls(ServerOptions(ssl_certfile=str(tmp_path / "none.pem"), ssl_keyfile=key))
    with pytest.raises(OptionError, match="they cannot be used"):
        check_tls(ServerOptions(ssl_certfile=certificate))
    with pytest.raises(OptionError, match="one process"):
        check_tls(ServerOptions(ssl_certfile=certificate, ssl_keyfile=key, api_server_count=2))
    with pytest.raises(OptionError, match="ssl_certfile as well"):
        check_tls(ServerOptions(ssl_keyfile=key))


def test_a_unix_socket_serves_and_leaves_nothing(tmp_path):
    path = str(tmp_path / "quire.sock")

    async def main():
        engine = await fake_engine(tmp_path / "model")
        with listen_at(path) as listener:
            server = http_server(ServerOptions(storage_url="sqlite:///:memory:"), listener, None)
            server.attach(engine)
            server.start()
            transport = httpx.AsyncHTTPTransport(uds=path)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                name = (await client.get("/v1/models")).json()["data"][0]["id"]
                answer = await client.post("/v1/completions", json={**QUESTION, "model": name})
                assert answer.status_code == 200, answer.text
                # a proxy may stand behind it
                assert (await client.get("/v1/admin/requests")).status_code == 404
            with pytest.raises(OptionError, match="in use"), listen_at(path):
                pass
            await server.close()
        engine.shutdown()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(asyncio.wait_for(main(), 60))
    assert not os.path.exists(path)


def test_the_socket_of_a_dead_server_is_replaced_and_a_file_is_not(tmp_path):
    left, file = tmp_path / "left.sock", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    with listen_at(str(left)):
        pass
    file.write_text("a letter")
    with pytest.raises(OptionError, match="cannot listen there"), listen_at(str(file)):
        pass
    assert file.read_text() == "a letter"


def test_the_line_to_try_names_the_socket():
    assert "curl --unix-socket /run/q.sock http://localhost/v1" in welcome(
        "http://localhost", "m", CHAT, has_key=False, uds="/run/q.sock"
    )
