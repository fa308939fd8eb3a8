"""Clients that go away: how, and when. Raw sockets, because no library goes away as rudely."""

from __future__ import annotations

import itertools
import json
import random
import socket
import struct
import time
from collections.abc import Callable
from urllib.parse import urlsplit

_LONG_PROMPT = "word " * 150
# at most so many sequences may run where clients leave the queue
MAX_NUM_SEQS = 8
# leaves a server, and says how many of its requests that ended
Leave = Callable[[str], int]


# As over a network: pieces of a packet's size, so that no buffer on the way holds megabytes.
_PACKET_BYTES = 1400
_WINDOW_BYTES = 2048


def address_of(url: str) -> tuple[str, int]:
    address = urlsplit(url)
    assert address.hostname is not None
    return address.hostname, address.port or 80


def connect(url: str, *, is_narrow: bool = False) -> socket.socket:
    """`is_narrow`: hardly anything waits on the way to a client that does not read."""
    connection = socket.socket()
    connection.settimeout(30)
    if is_narrow:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _PACKET_BYTES)
    connection.connect(address_of(url))
    return connection


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


def after_events(connection: socket.socket, count: int) -> None:
    heard = b""
    while heard.count(b"data: ") < count:
        piece = connection.recv(4096)
        assert piece, "the server closed the connection"
        heard += piece


def stream(end: Callable[[socket.socket], None], *, events: int, **fields: object) -> Leave:
    """A stream that is left after so many events."""

    def leave(url: str) -> int:
        connection = connect(url)
        send(connection, stream=True, **fields)
        after_events(connection, events)
        end(connection)
        return 1

    return leave


def whole(end: Callable[[socket.socket], None], seconds: float, **fields: object) -> Leave:
    """A request for a whole answer, left while it is made."""

    def leave(url: str) -> int:
        connection = connect(url)
        send(connection, **fields)
        time.sleep(seconds)
        end(connection)
        return 1

    return leave


def queued(url: str) -> int:
    """One that waits behind another, which takes all the rows and is left a moment later."""
    running, waiting = connect(url), connect(url)
    send(running, stream=True, n=MAX_NUM_SEQS)
    after_events(running, 1)
    send(waiting, stream=True)
    time.sleep(0.05)
    finish(waiting)
    finish(running)
    return 2


_FORMS = itertools.count()


def compiling(url: str) -> int:
    """Left while the form that it asks for is compiled; nobody has asked for that one before."""
    return whole(finish, 0.1, guided_choice=[f"form {next(_FORMS)}", "another"], ignore_eos=False)(url)


KINDS: dict[str, Leave] = {
    "stream, FIN": stream(finish, events=1),
    "stream, RST": stream(reset, events=1),
    "stream, half-closed": stream(half_close, events=2),
    "between tokens": stream(finish, events=5),
    "four choices": stream(finish, events=3, n=4),
    "whole answer, FIN": whole(finish, 0.1),
    "whole answer, RST": whole(reset, 0.1),
    "long prompt": whole(finish, 0.02, prompt=_LONG_PROMPT, max_tokens=60),
    "queued": queued,
    "while a form is compiled": compiling,
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
