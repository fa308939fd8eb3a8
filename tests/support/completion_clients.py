"""Many clients of a server at once, each with a connection of its own, and what each of them was told in the end."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """The whole text, or the error that came instead or in the middle. A connection that broke has status 0."""

    status: int
    text: str
    error: str | None = None


class CompletionClients:
    """Client number k always asks the same: one of three draws, every second one streams."""

    def __init__(self, url: str, num_clients: int = 32, *, logit_bias: Mapping[str, float] | None = None) -> None:
        parts = urlsplit(url)
        self._address = str(parts.hostname), int(parts.port or 0)
        self._num_clients = num_clients
        self._logit_bias = dict(logit_bias or {})

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def ask(self, number: int, token: int = 9) -> Answer:
        """`token` is one of the prompt's."""
        body: dict[str, Any] = {"model": "quire-embedded", "prompt": [5, 6, 7, 8 + number, token, 10], "seed": number}
        body |= {
            "max_tokens": 16,
            "ignore_eos": True,
            "temperature": 0.7 * (number % 3 == 0),
            "stream": number % 2 == 0,
        }
        try:
            status, text = self.call("POST", "/v1/completions", body | {"logit_bias": self._logit_bias})
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, "", str(error) or type(error).__name__)
        if status != 200 or not body["stream"]:
            answer = json.loads(text)
            return Answer(status, "", answer["error"]["message"]) if status != 200 else Answer(200, _text_of(answer))
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        error_event = next((event["error"]["message"] for event in events if "error" in event), None)
        return Answer(200, "".join(_text_of(event) for event in events if "error" not in event), error_event)

    def ask_all(self, tokens: Mapping[int, int] | None = None) -> list[Answer]:
        """All at once; `tokens` by number of the client, for some of them."""
        with ThreadPoolExecutor(self._num_clients) as pool:
            return list(
                pool.map(lambda number: self.ask(number, (tokens or {}).get(number, 9)), range(self._num_clients))
            )

    def metric(self, name: str) -> float:
        """Summed over its labels."""
        lines = self.call("GET", "/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"quire:{name}[{{ ]", line))


def children_of(process_id: int) -> list[int]:
    """Processes that it has started and that are there, on Linux."""
    files = Path(f"/proc/{process_id}/task").glob("*/children")
    return sorted(int(child) for file in files for child in file.read_text(encoding="utf-8").split())


def owner_of(client_port: int, server_port: int, pids: list[int]) -> int | None:
    """Who has the server's end of a connection open."""
    wanted = (f"{server_port:04X}", f"{client_port:04X}")
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if (fields[1].partition(":")[2], fields[2].partition(":")[2]) != wanted or fields[9] == "0":
            continue
        for pid in pids:
            links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
            if f"socket:[{fields[9]}]" in links:
                return pid
    return None


def _text_of(completion: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in completion["choices"])
