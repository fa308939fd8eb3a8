"""The server under test, as checks see it: the official client, plain HTTP, and bytes on a socket."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import openai

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What is seven plus five?"}]
PROMPT = "Once upon a time"
_SECONDS = 60.0


@dataclass
class Reply:
    """One HTTP response."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes
    # when each part of the body arrived
    times: list[float] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after a look at what holds for all of them."""
        assert self.headers["content-type"].partition(";")[0] == "application/json", self.headers["content-type"]
        assert self.headers["x-request-id"], "no x-request-id"
        assert set(self.json) == {"error"}, self.json
        error: dict[str, Any] = self.json["error"]
        assert set(error) >= {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str), error
        assert error["message"], error
        assert isinstance(error["type"], str), error
        for name in ("param", "code"):
            assert error[name] is None or isinstance(error[name], str), (
                f"{name} is {error[name]!r}: no string, not null"
            )
        return error

    @property
    def events(self) -> list[Any]:
        """The objects of a stream of events, which must be well formed and end with [DONE]."""
        assert self.status == 200, self.body[:300]
        text = self.body.decode()
        assert text.endswith("data: [DONE]\n\n"), text[-80:]
        events = []
        for event in text.split("\n\n")[:-2]:
            if event.startswith(":"):
                continue
            assert event.startswith("data: "), event[:80]
            assert "\n" not in event, event[:80]
            events.append(json.loads(event.removeprefix("data: ")))
        return events


class Target:
    """What is asked, with a key and a model's name."""

    def __init__(self, url: str, *, api_key: str = "", model: str = "") -> None:
        # with or without the /v1 that clients are given
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.prefix = parts.path
        self.api_key = api_key
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key or "none", max_retries=0, timeout=_SECONDS
        )
        self.model = model or self.client.models.list().data[0].id

    def close(self) -> None:
        self.client.close()

    # ------------------------------------------------------------------------------------------ the official client

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(**{**self._short(), "messages": MESSAGES, **fields})

    def complete(self, **fields: Any) -> Any:
        return self.client.completions.create(
            **{"model": self.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
        )

    def _short(self) -> dict[str, Any]:
        return {"model": self.model, "max_completion_tokens": 12, "temperature": 0}

    # ------------------------------------------------------------------------------------------ plain HTTP

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_SECONDS)
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        sent = {**key, **(headers or {})}
        try:
            connection.request(method, self.prefix + path, body, {name: value for name, value in sent.items() if value})
            response = connection.getresponse()
            parts, times = [], []
            while part := response.read1():
                parts.append(part)
                times.append(time.monotonic())
            return Reply(response.status, response.headers, b"".join(parts), times)
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """`body` becomes JSON, unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"Content-Type": "application/json", **headers})

    def post_chat(self, **fields: Any) -> Reply:
        return self.post(CHAT, {**self._short(), "messages": MESSAGES, **fields})

    def post_completion(self, **fields: Any) -> Reply:
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        return self.post(COMPLETIONS, {**body, **fields})

    # ------------------------------------------------------------------------------------------ bytes

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.create_connection((self.host, self.port), timeout=_SECONDS) as connection:
            yield connection

    def head(self, method: str, path: str, *lines: str) -> bytes:
        """The head of a request, with the key."""
        key = [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        all_lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.host}", *key, *lines]
        return "\r\n".join(all_lines).encode() + b"\r\n\r\n"

    def exchange(self, data: bytes) -> list[Reply]:
        """Sends bytes and reads until the other side closes: all responses that came."""
        with self.connected() as connection:
            connection.sendall(data)
            return answers_on(connection)


def answers_on(connection: socket.socket) -> list[Reply]:
    """All responses that come until the other side closes."""
    received = b""
    while part := connection.recv(65_536):
        received += part
    return list(_parsed(received))


def _parsed(received: bytes) -> Iterator[Reply]:
    """Responses that stand one behind the other, each with a length."""
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        first, _, lines = head.partition(b"\r\n")
        headers = http.client.parse_headers(_Lines(lines + b"\r\n\r\n"))
        length = int(headers["content-length"] or 0)
        yield Reply(int(first.split()[1]), headers, rest[:length])
        received = rest[length:]


class _Lines:
    """What http.client reads headers from."""

    def __init__(self, data: bytes) -> None:
        self._lines = data.splitlines(keepends=True)

    def readline(self, limit: int = -1) -> bytes:
        return self._lines.pop(0) if self._lines else b""
