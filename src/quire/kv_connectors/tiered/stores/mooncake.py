"""Blocks in the memory that engines lend to a Mooncake store: `mooncake://master:50051?memory=4`. The master knows
where each block lies; `memory` is what this engine adds, in GiB (0: nothing, it uses that of others), and goes with
it. `host`: the address at which others reach this engine. What was not read for longest is given up by the master.
"""

from __future__ import annotations

import socket
import threading
from urllib.parse import parse_qs, urlsplit

from mooncake.store import MooncakeDistributedStore

from quire.errors import OptionError
from quire.kv_connectors.tiered.stores.store import StoreState

_DEFAULT_PORT = 50051
_DEFAULT_GIB = 1.0
# through which what is read and written goes: more than the calls of all threads at once
_BUFFER_BYTES = 256 << 20


def open_store(address: str) -> Mooncake:
    parts = urlsplit(address)
    try:
        said = {name: values[-1] for name, values in parse_qs(parts.query, strict_parsing=bool(parts.query)).items()}
        memory = int(float(said.pop("memory", _DEFAULT_GIB)) * 2**30)
        host = said.pop("host", None)
        master = parts.hostname, parts.port or _DEFAULT_PORT
        if said or parts.hostname is None or memory < 0:
            raise ValueError(f"{', '.join(said) or 'the master'} cannot be understood")
    except ValueError as error:
        raise OptionError(
            f"kv_store={address}: {error}. Write mooncake://host:port?memory=GIB, and host=ADDRESS of this machine "
            "where it is not the one that reaches the master."
        ) from error
    return Mooncake(f"{master[0]}:{master[1]}", host or _own_address(str(master[0]), master[1]), memory)


class Mooncake:
    """The client is set up by the first call, so that an engine starts without its master."""

    def __init__(self, master: str, host: str, num_bytes: int) -> None:
        self._master = master
        self._host = host
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._client: MooncakeDistributedStore | None = None

    def exists_many(self, names: list[str]) -> list[bool]:
        if not names:
            return []
        answers = self._ready().batch_is_exist(names)
        _check(min(answers, default=0), "asking")
        return [answer == 1 for answer in answers]

    def get_many(self, names: list[str]) -> list[bytes | None]:
        if not names:
            return []
        # no value is empty: that is how it says that there is none
        return [value or None for value in self._ready().get_batch(names)]

    def put_many(self, values: list[tuple[str, bytes]]) -> None:
        if values:
            names, contents = zip(*values, strict=True)
            _check(self._ready().upsert_batch(list(names), list(contents)), "writing")

    def delete(self, names: list[str]) -> None:
        client = self._ready()
        for name in names:
            client.remove(name, True)

    def stat(self) -> StoreState:
        return StoreState()

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _ready(self) -> MooncakeDistributedStore:
        with self._lock:
            if self._client is None:
                client = MooncakeDistributedStore()
                status = client.setup(
                    self._host, "P2PHANDSHAKE", self._num_bytes, _BUFFER_BYTES, "tcp", "", self._master
                )
                _check(status, f"reaching the master {self._master}")
                self._client = client
            return self._client


def _check(status: int, what: str) -> None:
    if status < 0:
        raise ConnectionError(f"mooncake: {what} failed with status {status}")


def _own_address(host: str, port: int) -> str:
    """Of this machine, as the way to the master shows it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
