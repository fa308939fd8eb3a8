"""Live streams: so many requests at a time, one after the other, each recorded. The clients' side of a fault."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from typing import Any

import httpx2 as httpx
from tests.support.faults.history import BROKEN, FAILED, FINISHED, REFUSED, History, Record

# each begins otherwise, so that no answer can be taken for another's
PROMPTS = tuple(f"{word} of them says number {word}" for word in "One Two Three Four Five Six Seven Eight".split())
# Who was sent away comes again after a while: a restart is not to be slowed down by those who wait for it.
_PAUSE_SECONDS = 0.5


class LiveStreams:
    """`async with LiveStreams(url, 32, history) as streams`: they run until the end of the block."""

    def __init__(self, url: str, num_streams: int, history: History, max_tokens: int = 96) -> None:
        self.history = history
        self.url = url
        self._num_streams = num_streams
        self._max_tokens = max_tokens
        self._client = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=num_streams + 8))
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        # requests that have heard something and not ended
        self.num_live = 0
        # seconds between two pieces of the same answer, of all answers
        self.gaps: list[float] = []

    async def __aenter__(self) -> LiveStreams:
        for prompt in PROMPTS:
            # alone, so that what is right does not depend on who is computed beside it
            if prompt not in self.history.right:
                record = await self.ask(prompt)
                assert record.end == FINISHED, record
                self.history.right[prompt] = record.text
        self.history.records.clear()
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(self._num_streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Lets those that run end, unless there is nobody left to end them."""
        self._is_over = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def wait_finished(self) -> None:
        """After `finish`: until nothing runs any more."""
        await asyncio.gather(*self._tasks)

    def finish(self) -> None:
        """Nothing new is asked; what runs goes on."""
        self._is_over = True

    async def wait_live(self, count: int | None = None, seconds: float = 60.0) -> None:
        """Until so many streams, by default all, are in the middle of an answer at the same time, or nearly."""
        wanted = self._num_streams if count is None else count
        async with asyncio.timeout(seconds):
            while self.num_live < wanted:
                await asyncio.sleep(0.005)

    async def get(self, path: str) -> httpx.Response:
        return await self._client.get(self.url + path)

    async def is_ready(self) -> bool:
        return bool((await self.get("/health/ready")).status_code == 200)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Status and body of the answer."""
        answer = await self._client.post(self.url + path, json=body)
        return answer.status_code, answer.text

    async def upload(self, path: str, fields: dict[str, str], content: bytes) -> tuple[int, str]:
        """The same for a file."""
        answer = await self._client.post(self.url + path, data=fields, files={"file": ("lines.jsonl", content)})
        return answer.status_code, answer.text

    async def metric(self, name: str) -> float:
        """The sum over the labels of a metric."""
        [value] = await self.metrics(name)
        return value

    async def metrics(self, *names: str) -> list[float]:
        """Several at the same moment."""
        lines = (await self.get("/metrics")).text.splitlines()
        return [
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))
            for name in names
        ]

    async def ask(self, prompt: str) -> Record:
        """One request, and what was heard of it."""
        record = Record(prompt, time.monotonic())
        self.history.records.append(record)
        body = {"prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        heard = 0.0
        try:
            async with self._client.stream("POST", self.url + "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    _refused(record, response.status_code, json.loads(await response.aread()))
                    return record
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        before, heard = heard, time.monotonic()
                        if before:
                            self.gaps.append(heard - before)
                        else:
                            self.num_live += 1
                        _heard(record, line.removeprefix("data: "))
        except (httpx.HTTPError, OSError):
            pass  # it stays what it is: broken, unless an end was heard before
        finally:
            self.num_live -= bool(heard)
            record.ended = time.monotonic()
        return record

    async def _stream(self, number: int) -> None:
        for turn in itertools.count(number):
            if self._is_over:
                return
            record = await self.ask(PROMPTS[turn % len(PROMPTS)])
            if record.end in (REFUSED, BROKEN):
                await asyncio.sleep(_PAUSE_SECONDS)


def _heard(record: Record, data: str) -> None:
    if data == "[DONE]":
        return
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        record.end, record.code = FAILED, event["error"]["code"]
        record.num_ends += 1
        return
    for choice in event["choices"]:
        record.text += choice["text"]
        if choice["finish_reason"] is not None:
            record.end = FINISHED
            record.num_ends += 1


def _refused(record: Record, status: int, answer: dict[str, Any]) -> None:
    record.end, record.code = REFUSED if status == 503 else FAILED, answer["error"]["code"]
    record.num_ends += 1
