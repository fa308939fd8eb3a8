"""A small HTTP client that notes when the events of a streamed completion came. Speaks to this machine only."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from quire.errors import EngineError, one_line
from quire.interfaces.cli.bench_report import Timeline

HOST = "127.0.0.1"
_DONE = b"[DONE]"
_NEVER_LONGER = 1 << 20


class ServerAnswerError(EngineError):
    """The server said something else than what was asked for."""


async def stream_completion(port: int, prompt: list[int], output_length: int) -> Timeline:
    """One request with a connection of its own; the clock starts when it is sent."""
    body = {
        "prompt": prompt,
        "max_tokens": output_length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timeline = Timeline(num_prompt_tokens=len(prompt), start=time.perf_counter())
    num_tokens = None
    try:
        async for event in _events(port, "/v1/completions", body):
            now = time.perf_counter()
            if "error" in event:
                raise ServerAnswerError(f"the server answered: {event['error']}")
            if event.get("choices"):
                timeline.add(now, 1)
            if usage := event.get("usage"):
                num_tokens = usage["completion_tokens"]
    except (OSError, EOFError, ValueError) as error:
        raise ServerAnswerError(f"the server went away, or speaks otherwise ({one_line(error)})") from error
    if num_tokens != output_length or not timeline.arrivals:
        raise ServerAnswerError(f"the server sent {num_tokens} tokens, {output_length} were asked for")
    # several tokens may have come in one event; what is missing came with the last
    last, count = timeline.arrivals[-1]
    timeline.arrivals[-1] = (last, count + num_tokens - timeline.num_tokens)
    return timeline


async def is_ready(port: int) -> bool:
    """Whether requests are answered already."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


async def _events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(HOST, port, limit=_NEVER_LONGER)
    try:
        writer.write(head.encode() + data)
        status = await reader.readline()
        while (await reader.readline()).strip():
            pass
        if b" 200 " not in status:
            answer = await reader.read(_NEVER_LONGER)
            raise ServerAnswerError(f"the server answered {status.decode().strip()}: {answer.decode()[:300]}")
        async for line in _lines(reader):
            if line.startswith(b"data: ") and not line.endswith(_DONE):
                yield json.loads(line[6:])
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines of a body that comes in chunks; a chunk may end anywhere."""
    rest = b""
    while size := int((await reader.readline()).strip() or b"0", 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *whole, rest = rest.split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
