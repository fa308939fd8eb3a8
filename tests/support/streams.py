"""Clients of a server that may fail them: what each was told, and when."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


class ServedTime:
    """Seconds from now on, less those in which threads of these processes had work and no processor was free: how soon
    something is done says nothing where a machine is busy with other things. On a quiet one it is the time."""

    def __init__(self, processes: Iterable[int]) -> None:
        self._processes = tuple(processes)
        self._delays = dict(self._waited())
        self._began = time.monotonic()

    def until(self, moment: float) -> float:
        """`moment`: of the monotonic clock, and past."""
        waited = sum(seconds - self._delays.get(thread, 0.0) for thread, seconds in self._waited())
        return moment - self._began - waited

    def _waited(self) -> Iterator[tuple[str, float]]:
        for process in self._processes:
            for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
                # a thread may be gone by now, and a kernel need not count
                with contextlib.suppress(OSError):
                    yield str(file), int(file.read_text(encoding="ascii").split()[1]) / 1e9


def until(holds: Callable[[], object], seconds: float, what: str, processes: Iterable[int] = ()) -> float:
    """Seconds until it held. `processes`: those that have to bring it about, in so much time that serves them."""
    began = time.monotonic()
    served = ServedTime(processes)
    while not holds():
        now = time.monotonic()
        assert now - began < seconds or served.until(now) < seconds, what
        time.sleep(0.02)
    return time.monotonic() - began


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=60) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


class Client(threading.Thread):
    """One stream: the log-probabilities of what it said, which have the same bits whoever else is there, and each error
    that it was told, and when it ended."""

    def __init__(self, url: str, prompt: list[int], num_tokens: int = 60) -> None:
        super().__init__(daemon=True)
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body["logprobs"] = 1
        self._request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        self.said: list[float] = []
        self.errors: list[str] = []
        self.ended_at = 0.0
        self.start()

    @property
    def error(self) -> str | None:
        """The one that there may be."""
        assert len(self.errors) <= 1, self.errors
        return self.errors[0] if self.errors else None

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=60) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[6:]))
        except urllib.error.HTTPError as error:
            self.errors.append(error.read().decode())
        self.ended_at = time.monotonic()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.errors.append(event["error"]["message"])
            return
        for choice in event["choices"]:
            self.said += (choice["logprobs"] or {}).get("token_logprobs", [])


def answers(url: str, prompts: Sequence[list[int]]) -> list[list[float]]:
    clients = [Client(url, prompt, 8) for prompt in prompts]
    for client in clients:
        client.join(60)
        assert client.error is None, client.error
        assert len(client.said) == 8
    return [client.said for client in clients]
