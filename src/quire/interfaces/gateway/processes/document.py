"""What a further process of the server is told when it starts. It holds keys, so it comes by standard input."""

from __future__ import annotations

import msgspec

from quire.config import EngineConfig
from quire.interfaces.server.options import ServerOptions


class ProcessDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    config: EngineConfig
    options: ServerOptions
    # its place among the processes: 1, 2, ...
    seat: int
    num_seats: int
    # as the first process has read them: the columns of the counts
    tenants: list[str]
    # descriptors that it has inherited: the listening socket, the channel, where connections are handed on, the counts
    listener: int
    channel: int
    connections: int
    counts: int
    # the file of keys, as it was when the server started
    keys: int | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        inherited = (self.listener, self.channel, self.connections, self.counts)
        return inherited if self.keys is None else (*inherited, self.keys)
