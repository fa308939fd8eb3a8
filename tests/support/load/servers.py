"""The servers that are loaded, and what they and their system have to allow for it."""

from __future__ import annotations

import json
import resource
from urllib.parse import urlsplit

from tests.support.server_process import ServerProcess

from quire.errors import UserError

_SERVE = ["serve", "--port", "0", "--storage-url", "sqlite:///:memory:", "--crash-reports", "none"]
_COMMANDS = {
    # a core that answers at once: what is loaded is the front end
    "null": ["-m", "tests.support.null_server"],
    # the real core, and a model that computes nothing
    "paced": ["-m", "tests.support.faults.paced_core", *_SERVE],
    "embedded": ["-m", "quire.interfaces.cli", *_SERVE, "--num-threads", "1"],
}
ENGINES = tuple(_COMMANDS)
# besides connections: libraries, sockets of the engine, files
_OTHER_DESCRIPTORS = 128


class LoadedServer(ServerProcess):
    """In processes of its own; `options` are those of `quire serve`. Of its log only the end is kept."""

    def __init__(self, engine: str, *options: str) -> None:
        super().__init__([*_COMMANDS[engine], *options], num_kept_lines=200)
        self._engine = engine

    def place(self) -> tuple[str, int]:
        """Where it listens, when it is ready."""
        if self._engine == "null":
            return "127.0.0.1", json.loads(self.wait_for('{"port"'))["port"]
        address = urlsplit(self.wait_ready())
        assert address.hostname is not None
        assert address.port is not None
        return address.hostname, address.port


def allow_connections(count: int) -> None:
    """This process, and those that it starts from now on, may have so many at a time."""
    needed = count + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"{count:,} connections: a process needs {needed:,} file descriptors for them and may have {hard:,} here, "
            "the hard limit (ulimit -Hn). Ask for fewer connections, or raise the limit."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
