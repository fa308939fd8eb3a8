"""Clients that go away: how, and when. Raw sockets, because no library goes away as rudely."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable
from urllib.parse import urlsplit

_LONG_PROMPT = "word " * 150


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname is not None
    return socket.create_connection((address.hostname, address.port or 80), timeout=30)


def send(connection: socket.socket, **fields: object) -> None:
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 180, "ignore_eos": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)


def finish(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    """Says that it sends no more. Servers cannot tell this from leaving, and leaving is what it mostly is."""
    connection.shutdown(socket.SHUT_WR)


def _after_events(connection: socket.socket, count: int) -> None:
    heard = b""
    while heard.count(b"data: ") < count:
        piece = connection.recv(4096)
        assert piece, "the server closed the connection"
        heard += piece


def stream(end: Callable[[socket.socket], None], *, events: int, **fields: object) -> Callable[[str], None]:
    """A stream that is left after so many events."""

    def leave(url: str) -> None:
        connection = connect(url)
        send(connection, stream=True, **fields)
        _after_events(connection, events)
        end(connection)

    return leave


def whole(end: Callable[[socket.socket], None], seconds: float, **fields: object) -> Callable[[str], None]:
    """A request for a whole answer, left while it is made."""

    def leave(url: str) -> None:
        connection = connect(url)
        send(connection, **fields)
        time.sleep(seconds)
        end(connection)

    return leave


KINDS: dict[str, Callable[[str], None]] = {
    "stream, FIN": stream(finish, events=1),
    "stream, RST": stream(reset, events=1),
    "stream, half-closed": stream(half_close, events=2),
    "between tokens": stream(finish, events=5),
    "four choices": stream(finish, events=3, n=4),
    "whole answer, FIN": whole(finish, 0.1),
    "whole answer, RST": whole(reset, 0.1),
    "long prompt": whole(finish, 0.02, prompt=_LONG_PROMPT, max_tokens=60),
}


def storm(url: str, count: int, seed: int) -> None:
    """Requests of which each is left at a time of its own; 64 are open at once."""
    random_ = random.Random(seed)
    is_open: list[tuple[float, socket.socket]] = []
    for _ in range(count):
        connection = connect(url)
        send(connection, stream=random_.random() < 0.7, max_tokens=random_.randint(1, 180))
        is_open.append((time.monotonic() + random_.random() * 0.3, connection))
        if len(is_open) >= 64:
            is_open.sort(key=lambda pair: pair[0])
            when, first = is_open.pop(0)
            time.sleep(max(0.0, when - time.monotonic()))
            random_.choice((finish, reset))(first)
    for _, connection in is_open:
        finish(connection)
