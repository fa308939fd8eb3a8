"""One streamed request on a connection of its own, as a client sees it: status, first event, end."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: load\r\ncontent-type: application/json\r\nconnection: close\r\n"


@dataclass(slots=True)
class Seen:
    """What became of one request. Times are seconds since it was sent."""

    status: int
    retry_after: int | None
    # of the first event of a stream, or of the whole answer of a refusal
    first: float
    num_events: int
    is_done: bool
    # the longest time without a byte
    silence: float


async def stream_once(port: int, prompt: list[int], max_tokens: int) -> Seen:
    """Sends a completion and reads it to its end."""
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = began = time.perf_counter()
    silence = 0.0
    try:
        writer.write(_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        status = int(head[0].split()[1])
        headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
        retry_after = int(headers["retry-after"]) if "retry-after" in headers else None
        first, num_events, is_done = 0.0, 0, False
        silence, heard = time.perf_counter() - began, time.perf_counter()
        while line := await reader.readline():
            silence, heard = max(silence, time.perf_counter() - heard), time.perf_counter()
            if line.startswith((b"data: {", b"{")) and not first:
                first = time.perf_counter() - began
            num_events += line.startswith(b'data: {"id"')
            is_done = is_done or line.startswith(b"data: [DONE]")
        return Seen(status, retry_after, first or time.perf_counter() - began, num_events, is_done, silence)
    finally:
        writer.close()
