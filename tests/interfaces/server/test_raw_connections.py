"""Whatever bytes come over a connection, it ends by an answer or by being closed, within the server's deadlines.

All cases run side by side on one server, which waits two seconds for a head or a first message: a busy machine has
answered all handshakes by then. Each client sends its bytes, keeps its side open, and reads until the server closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import struct
from dataclasses import dataclass, field

import pytest

from quire.interfaces.gateway.app import http_server
from quire.interfaces.server.openai import prompt_pieces
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.transport.listener import listen
from quire.testing.fake_engine import fake_engine

CHAT = "/v1/chat/completions"
SOCKET = "/v1/completions/stream"
UPGRADE = ("Connection: Upgrade", "Upgrade: websocket")
KEYS = ("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13")
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


def head(method: str, path: str, *lines: str, version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"{method} {path} {version}", "Host: x", *lines, "", ""]).encode("latin-1")


def handshake(*lines: str, method: str = "GET", path: str = SOCKET, version: str = "HTTP/1.1") -> bytes:
    return head(method, path, *UPGRADE, *KEYS, *lines, version=version)


def frame(opcode: int, data: bytes = b"", *, is_last: bool = True, is_masked: bool = True, bits: int = 0) -> bytes:
    first = opcode | bits | (0x80 if is_last else 0)
    mask_bit = 0x80 if is_masked else 0
    length = bytes([mask_bit | len(data)]) if len(data) < 126 else struct.pack("!BH", mask_bit | 126, len(data))
    # a mask of zeros leaves the data as it is
    return bytes([first]) + length + (bytes(4) if is_masked else b"") + data


FIELDS = frame(TEXT, b'{"max_tokens": 3, "prompt": "Hello"}')
FINAL = frame(TEXT, b'{"is_final": true}')
LIVE = head("GET", "/health/live")
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
POST = (f"Content-Length: {len(BODY)}", "Content-Type: application/json")


@dataclass
class Case:
    # bytes are sent one part after the other; a socket sends `sent` when its handshake has been accepted
    sent: tuple[bytes, ...]
    # of the HTTP answers, in order; () where it is just closed
    statuses: tuple[int, ...] = ()
    # how the server closes the socket; None: there is none, or the connection just ends
    code: int | None = None
    # sent again and again as long as the connection is open
    dribble: bytes = b""
    wants: tuple[bytes, ...] = field(default=())


def socket_case(*sent: bytes, code: int | None, dribble: bytes = b"", wants: tuple[bytes, ...] = ()) -> Case:
    return Case((handshake(), *sent), (101,), code, dribble, wants)


# what the socket says that has no first message, before the clock between two pieces strikes
NOTHING_CAME = (b"No message came for 2 seconds (first_byte_seconds).",)


REFUSED: dict[str, Case] = {
    f"{method} asks for a WebSocket, {name}": Case(
        (handshake(*lines, method=method, path=path) + body,), (405,), wants=(b"allow: GET\r\n",)
    )
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS")
    for path in (CHAT,)
    for name, lines, body in (
        ("without a body", (), b""),
        ("with a body", POST, BODY.encode()),
        ("with a body that does not come", POST, b""),
    )
}
HEADS: dict[str, Case] = {
    "PATCH with a long line": Case((handshake("X: " + "a" * 20_000, method="PATCH"),), (405,)),
    "GET with a length": Case((handshake("Content-Length: 5"),), (400,)),
    "GET with a length and its body": Case((handshake("Content-Length: 5") + b"hello",), (400,)),
    "GET with a length of nothing": Case((handshake("Content-Length: 0"),), (101,), 1008),
    "GET in chunks": Case((handshake("Transfer-Encoding: chunked") + b"5\r\nhello\r\n",), (400,)),
    "GET with a length that is none": Case((handshake("Content-Length: many"),), (400,)),
    "a line of 20 KB": Case((handshake("X: " + "a" * 20_000),), (101,), 1008),
    "headers of 70 KB": Case((handshake(*[f"X{n}: " + "a" * 1000 for n in range(70)]),), (431,)),
    "headers of 70 KB in pieces": Case(
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX: ", *[b"a" * 14_000] * 5), (431,)
    ),
    "90 headers": Case((handshake(*[f"X{n}: a" for n in range(90)]),), (101,), 1008),
    "140 headers": Case((handshake(*[f"X{n}: a" for n in range(140)]),), (431,)),
    "140 headers with POST": Case((handshake(*[f"X{n}: a" for n in range(140)], method="POST"),), (405,)),
    "a path of 20 KB": Case((handshake(path="/" + "a" * 20_000),), (404,)),
    "a path that is none": Case((head("GET", "\u00e4", *UPGRADE, *KEYS),), (400,)),
    "another path": Case((handshake(path=CHAT),), (404,)),
    "no key": Case((head("GET", SOCKET, *UPGRADE, KEYS[1]),), (400,)),
    "a key that is none": Case((head("GET", SOCKET, *UPGRADE, "Sec-WebSocket-Key: a", KEYS[1]),), (400,)),
    "no version": Case((head("GET", SOCKET, *UPGRADE, KEYS[0]),), (400,)),
    "an old version": Case(
        (head("GET", SOCKET, *UPGRADE, KEYS[0], "Sec-WebSocket-Version: 8"),),
        (426,),
        wants=(b"sec-websocket-version: 13\r\n", b"upgrade: websocket\r\n"),
    ),
    "no host": Case((handshake().replace(b"Host: x\r\n", b""),), (400,)),
    "a page of another origin": Case((handshake("Origin: http://evil.test"),), (403,)),
    "two upgrades": Case((head("GET", SOCKET, "Upgrade: h2c", *UPGRADE, *KEYS),), (426,)),
    "HTTP/1.0 is not upgraded": Case((handshake(path="/health/live", version="HTTP/1.0"),), (200,)),
    "HTTP/1.0 POST keeps its body": Case((handshake(*POST, method="POST", path=CHAT, version="HTTP/1.0"),), (408,)),
    "HTTP/2.0": Case((handshake(version="HTTP/2.0"),), (404,)),
    "HTTP/0.9": Case((b"GET /\r\n\r\n",), (400,)),
    "CONNECT": Case((head("CONNECT", "x:443", "Content-Length: 3") + b"abc",), (405,)),
    "half a head": Case((handshake()[:-2],)),
    "half a line": Case((b"GET /v1",)),
    "nothing": Case(()),
    "a head byte by byte": Case((b"GET / HTTP/1.1\r\nX: ",), dribble=b"a"),
    "line ends": Case((b"\r\n",), dribble=b"\r\n"),
    "a request, then line ends": Case((LIVE,), (200,), dribble=b"\r\n"),
    "a request, then half of one": Case((LIVE + LIVE[:-2],), (200,)),
    "what is left of a body, byte by byte": Case(
        (head("POST", "/nowhere", "Content-Length: 100000", POST[1]),), (404,), dribble=b"a"
    ),
    "a body that does not come": Case((head("POST", CHAT, *POST),), (408,)),
    "h2c is ignored": Case((head("GET", "/health/live", UPGRADE[0], "Upgrade: h2c") + LIVE,), (200, 200)),
    "h2c with a body": Case(
        (head("POST", CHAT, UPGRADE[0], "Upgrade: h2c", *POST) + BODY.encode() + LIVE,), (200, 200)
    ),
    "h2c with a body in another packet": Case(
        (head("POST", CHAT, UPGRADE[0], "Upgrade: h2c", *POST), BODY.encode()), (200,)
    ),
    "h2c again and again": Case((head("GET", "/health/live", UPGRADE[0], "Upgrade: h2c") * 400,), (200,) * 400),
    "behind a request in its packet": Case((head("POST", CHAT, *POST) + BODY.encode() + handshake(),), (200,)),
    "behind a request that was answered": Case((LIVE, b"", handshake()), (200, 101), 1008),
    "a handshake behind a handshake": Case((handshake() + handshake(),), (101,), 1002),
    "garbage behind a handshake": Case((handshake() + b"\xff" * 50,), (101,), 1002),
    "frames in the packet of the handshake": Case((handshake() + FIELDS + FINAL,), (101,), 1000),
}
SOCKETS: dict[str, Case] = {
    "silence": socket_case(code=1008, wants=NOTHING_CAME),
    "pings and nothing else": socket_case(code=1008, dribble=frame(PING, b"a"), wants=NOTHING_CAME),
    "pongs and nothing else": socket_case(code=1008, dribble=frame(PONG), wants=NOTHING_CAME),
    "silence after the fields": socket_case(FIELDS, code=1008),
    "pings after the fields": socket_case(FIELDS, code=1008, dribble=frame(PING)),
    "an answer, then silence": socket_case(FIELDS, FINAL, code=1000),
    "an answer, then pings": socket_case(FIELDS, FINAL, code=1000, dribble=frame(PING)),
    "half a frame": socket_case(FIELDS[:7], code=1008, wants=NOTHING_CAME),
    "half the length of a frame": socket_case(b"\x81\xff\x00", code=1008, wants=NOTHING_CAME),
    "half a frame after the fields": socket_case(FIELDS, FINAL[:5], code=1008),
    "a frame byte by byte": socket_case(b"\x81\xfe\xff\xff" + bytes(4), code=1008, dribble=b"a", wants=NOTHING_CAME),
    "fragments without an end": socket_case(
        frame(TEXT, b"{", is_last=False), code=1008, dribble=frame(0, b" ", is_last=False), wants=NOTHING_CAME
    ),
    "fragments of nothing": socket_case(frame(TEXT, is_last=False), frame(0, is_last=False) * 5000, code=1009),
    "a fragment of nothing": socket_case(frame(0, b"a"), code=1002),
    "a message inside another": socket_case(frame(TEXT, b"{", is_last=False), FIELDS, code=1002),
    "a ping inside a message": socket_case(
        frame(TEXT, b"{}"[:1], is_last=False), frame(PING), frame(0, b"}"), FINAL, code=1008
    ),
    "no mask": socket_case(frame(TEXT, b"{}", is_masked=False), code=1002),
    "a reserved bit": socket_case(frame(TEXT, b"{}", bits=0x40), code=1002),
    "an opcode that is none": socket_case(frame(3, b"{}"), code=1002),
    "a ping in fragments": socket_case(frame(PING, is_last=False), code=1002),
    "a ping that is too long": socket_case(frame(PING, b"a" * 126), code=1002),
    "a frame that is too large": socket_case(b"\x81\xff" + struct.pack("!Q", 2**21), code=1009),
    "a length with a sign": socket_case(b"\x81\xff" + b"\xff" * 8, code=1009),
    "fragments that are too large": socket_case(
        *[frame(TEXT if n == 0 else 0, b"a" * 65_000, is_last=False) for n in range(17)], code=1009
    ),
    "a text that is none": socket_case(frame(TEXT, b"\xff\xfe"), code=1007),
    "a text that is none in fragments": socket_case(frame(TEXT, b"\xc3", is_last=False), frame(0, b"("), code=1007),
    "bytes": socket_case(frame(BINARY, b"{}"), code=1008),
    "no JSON": socket_case(frame(TEXT, b"{"), code=1008),
    "a close": socket_case(frame(CLOSE, b"\x03\xe8"), code=1000),
    "a close without a code": socket_case(frame(CLOSE), code=1005),
    "a close of one byte": socket_case(frame(CLOSE, b"\x03"), code=1002),
    "a close with a code that is none": socket_case(frame(CLOSE, b"\x00\x01"), code=1002),
    "a close with a reason that is no text": socket_case(frame(CLOSE, b"\x03\xe8\xff"), code=1007),
    "a close inside a message": socket_case(frame(TEXT, b"{", is_last=False), frame(CLOSE, b"\x03\xe8"), code=1002),
    "a close, then more": socket_case(frame(CLOSE, b"\x03\xe8") + FIELDS, code=1000, dribble=FIELDS),
    "a mistake, then garbage instead of a close": socket_case(frame(TEXT, b"{"), code=1008, dribble=b"\xff"),
    "words after the last one": socket_case(FIELDS, FINAL + FIELDS, code=1008),
}
CASES = {**REFUSED, **HEADS, **SOCKETS}


# ---------------------------------------------------------------------------------------------- running them


async def talk(port: int, case: Case) -> bytes:
    """What the server says until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()
    # the server may close, or cut off, in the middle of anything
    with contextlib.suppress(ConnectionError):
        for number, part in enumerate(case.sent):
            if number and case.statuses:
                # where the first part is answered, the second one follows the answer
                first = case.sent[0]
                if first.endswith(b"\r\n\r\n") and b"Content-Length" not in first and b"\r\n\r\n" not in answer:
                    answer += await reader.readuntil(b"\r\n\r\n")
            writer.write(part)
            await writer.drain()
        dribbling = asyncio.ensure_future(_dribble(writer, case.dribble))
        try:
            while data := await reader.read(2**16):
                answer += data
        finally:
            dribbling.cancel()
            await asyncio.wait([dribbling])
    writer.close()
    return bytes(answer)


async def _dribble(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while data:
            await asyncio.sleep(0.02)
            writer.write(data)
            await writer.drain()


def statuses_in(answer: bytes) -> tuple[int, ...]:
    return tuple(int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer))


def close_code_in(answer: bytes) -> int | None:
    """Of the frames behind the head that accepts the socket."""
    rest = answer[answer.index(b"HTTP/1.1 101") :].partition(b"\r\n\r\n")[2]
    while rest:
        length = rest[1]
        start = 2
        if length == 126:
            start = 4
            [length] = struct.unpack("!H", rest[2:4])
        data, opcode, rest = rest[start : start + length], rest[0] & 15, rest[start + length :]
        if opcode == CLOSE:
            return struct.unpack("!H", data[:2])[0] if data else 1005
    return None


@dataclass
class Outcome:
    answers: dict[str, bytes | BaseException]
    # afterwards
    num_connections: int
    num_unfinished: int
    is_alive: bool
    errors: list[str]


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Outcome:
    errors = _Errors()

    async def main() -> Outcome:
        engine = await fake_engine(tmp_path_factory.mktemp("raw") / "model", max_model_len=512)
        options = ServerOptions(
            storage_url="sqlite:///:memory:", first_byte_seconds=2, keep_alive_seconds=2, max_request_seconds=8.0
        )
        with listen("127.0.0.1", 0) as listener:
            server = http_server(options, listener, None)
            server.attach(engine)
            server.start()
            port = listener.getsockname()[1]
            tasks = {name: asyncio.ensure_future(talk(port, case)) for name, case in CASES.items()}
            _, still_open = await asyncio.wait(tasks.values(), timeout=40)
            for task in still_open:
                task.cancel()
            await asyncio.wait(tasks.values())
            answers = {
                name: TimeoutError() if task.cancelled() else task.exception() or task.result()
                for name, task in tasks.items()
            }
            for _ in range(3):
                await asyncio.sleep(0)
            [(_, uvicorn)] = server._ports
            num_connections = len(uvicorn.server_state.connections)
            num_unfinished = len(server._unfinished)
            alive = await talk(port, Case((head("GET", "/health/live", "Connection: close"),)))
            await server.close()
        engine.shutdown()
        return Outcome(answers, num_connections, num_unfinished, b" 200 OK" in alive, errors.lines)

    loggers = [logging.getLogger(name) for name in ("quire", "uvicorn", "asyncio")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_pieces, "IDLE_SECONDS", 4.0)
        for logger in loggers:
            logger.addHandler(errors)
        try:
            return asyncio.run(asyncio.wait_for(main(), 60))
        finally:
            for logger in loggers:
                logger.removeHandler(errors)


def test_there_are_enough() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_it_ends(outcome: Outcome, name: str) -> None:
    case, answer = CASES[name], outcome.answers[name]
    assert isinstance(answer, bytes), f"still open: {answer!r}"
    assert statuses_in(answer) == case.statuses, answer[:1000]
    if 101 in case.statuses:
        assert close_code_in(answer) == case.code, answer[:1000]
    for words in case.wants:
        assert words.lower() in answer.lower()
    if case.statuses and case.statuses[-1] >= 400:
        body = answer.rpartition(b"\r\n\r\n")[2]
        assert json.loads(body)["error"]["message"]
        assert b"x-request-id: " in answer.lower()


def test_nothing_is_left(outcome: Outcome) -> None:
    assert (outcome.num_connections, outcome.num_unfinished) == (0, 0)
    assert outcome.is_alive
    assert outcome.errors == []
