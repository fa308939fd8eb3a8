"""The listening socket, as several processes share it."""

from __future__ import annotations

import os
import socket

from quire.interfaces.server.http_server import listener_copies
from quire.interfaces.server.transport.listener import listen


def test_no_process_makes_the_socket_of_all_wait() -> None:
    """One that begins to listen would have the others wait in `accept` for a connection that it took itself."""
    first = listen("127.0.0.1", 0)
    opened = [first]
    try:
        opened = listener_copies(first)
        assert not os.get_blocking(first.fileno())
        # as a further process gets it: a number
        opened += listener_copies(socket.socket(fileno=os.dup(first.fileno())))
        assert not any(os.get_blocking(one.fileno()) for one in opened)
    finally:
        for one in opened:
            one.close()
