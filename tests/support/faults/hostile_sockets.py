"""What raw connections send: heads, bodies, upgrades and frames that no client means, each from its seed alone."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Iterable

_NUM_AT_ONCE = 200
# prompts that come in pieces may pause for a minute
_SECONDS = 100.0
_SOCKET = "/v1/completions/stream"
_PATHS = (_SOCKET, "/v1/chat/completions", "/health/live", "/nowhere", "/" + "a" * 20_000)
_METHODS = ("GET", "GET", "GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "CONNECT", "BREW")
_VERSIONS = ("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9")
_KEYS = ("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13")
_UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", *_KEYS)
_UPGRADES: tuple[tuple[str, ...], ...] = (
    _UPGRADE,
    _UPGRADE,
    (),
    _UPGRADE[:2],
    ("Connection: Upgrade", "Upgrade: h2c"),
    (*_UPGRADE[:3], "Sec-WebSocket-Version: 8"),
    ("Upgrade: websocket",),
    ("Connection: Upgrade",),
    (*_UPGRADE, "Origin: http://evil.test"),
    (*_UPGRADE, "Sec-WebSocket-Extensions: permessage-deflate"),
)
# headers, and what follows them
_BODIES: tuple[tuple[tuple[str, ...], bytes], ...] = (
    ((), b""),
    (("Content-Length: 5",), b"hello"),
    (("Content-Length: 100000",), b"a"),
    (("Content-Length: many",), b"a"),
    (("Content-Length: -1",), b"a"),
    (("Content-Length: 5", "Content-Length: 6"), b"hello"),
    (("Content-Length: 5", "Transfer-Encoding: chunked"), b"5\r\nhello\r\n0\r\n\r\n"),
    (("Transfer-Encoding: chunked",), b"5\r\nhello\r\n0\r\n\r\n"),
    (("Transfer-Encoding: chunked",), b"FFFFFFFFFFFFFFFFF\r\n"),
    (("Transfer-Encoding: chunked",), b"5\r\nhel"),
    (("Expect: 100-continue", "Content-Length: 5"), b""),
)


def _frame(opcode: int, data: bytes = b"", *, is_last: bool = True, is_masked: bool = True, bits: int = 0) -> bytes:
    mask_bit = 0x80 if is_masked else 0
    length = bytes([mask_bit | len(data)]) if len(data) < 126 else struct.pack("!BH", mask_bit | 126, len(data))
    return bytes([opcode | bits | (0x80 if is_last else 0)]) + length + (bytes(4) if is_masked else b"") + data


_FIRST = _frame(1, b'{"max_tokens": 3, "prompt": "Hello"}')
_FRAMES = (
    b"",
    _FIRST,
    _FIRST + _frame(1, b'{"is_final": true}'),
    _FIRST[:7],
    _frame(1, b"no JSON"),
    _frame(1, b"\xff\xfe"),
    _frame(1, b"a", is_masked=False),
    _frame(2, bytes(100)),
    _frame(0, b"a"),
    _frame(1, b"a", is_last=False) * 50,
    _frame(3, b"a"),
    _frame(1, b"a", bits=0x40),
    _frame(8),
    _frame(8, b"\x00"),
    _frame(8, struct.pack("!H", 1000)) + _FIRST,
    _frame(9, b"ping") * 50,
    _frame(10) * 50,
    b"\x81\xff" + struct.pack("!Q", 2**62),
    bytes([0x89, 0xFE]) + struct.pack("!H", 300) + bytes(304),
)


def _head(chosen: random.Random) -> bytes:
    bodied, body = chosen.choice(_BODIES)
    lines = [*chosen.choice(_UPGRADES), *bodied, *_many_headers(chosen)]
    chosen.shuffle(lines)
    first = f"{chosen.choice(_METHODS)} {chosen.choice(_PATHS)} {chosen.choice(_VERSIONS)}"
    return "\r\n".join([first, "Host: x", *lines, "", ""]).encode("latin-1") + body


def _many_headers(chosen: random.Random) -> list[str]:
    kinds: tuple[Callable[[], list[str]], ...] = (
        list,
        list,
        lambda: ["X: " + "a" * 20_000],
        lambda: [f"X{number}: a" for number in range(140)],
        lambda: [f"X{number}: " + "a" * 1_000 for number in range(70)],
        lambda: ["X: \x00\x01", "Y: \xff"],
        lambda: ["no colon"],
        lambda: [" folded: line"],
    )
    return chosen.choice(kinds)()


def _handshake(chosen: random.Random) -> bytes:
    return "\r\n".join([f"GET {_SOCKET} HTTP/1.1", "Host: x", *_UPGRADE, "", ""]).encode()


def parts_of(seed: int) -> tuple[bytes, ...]:
    """What is sent, one part after the other with a little time between them. Nobody closes afterwards."""
    chosen = random.Random(seed)
    match chosen.randrange(8):
        case 0 | 1 | 2:
            return (_head(chosen),)
        case 3 | 4:
            return (_handshake(chosen), chosen.choice(_FRAMES), chosen.choice(_FRAMES))
        case 5:
            # half of something
            whole = _head(chosen)
            return (whole[: chosen.randrange(len(whole))],)
        case 6:
            # pipelined
            return (b"".join(_head(chosen) for _ in range(chosen.randint(2, 20))),)
        case _:
            return (bytes(chosen.randrange(256) for _ in range(chosen.randrange(200))), _head(chosen))


def left_open(address: tuple[str, int], seeds: Iterable[int]) -> list[int]:
    """The seeds whose connections the server does not end, of which this end stays open."""
    return asyncio.run(_left_open(address, seeds))


async def _left_open(address: tuple[str, int], seeds: Iterable[int]) -> list[int]:
    left, found = iter(seeds), list[int]()

    async def send() -> None:
        for seed in left:
            if not await _is_ended(address, parts_of(seed)):
                found.append(seed)

    async with asyncio.TaskGroup() as group:
        for _ in range(_NUM_AT_ONCE):
            group.create_task(send())
    return found


async def _is_ended(address: tuple[str, int], parts: tuple[bytes, ...]) -> bool:
    try:
        async with asyncio.timeout(_SECONDS):
            reader, writer = await asyncio.open_connection(*address)
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                while await reader.read(1 << 16):
                    pass
            finally:
                writer.close()
    except TimeoutError:
        return False
    except OSError:
        pass
    return True
