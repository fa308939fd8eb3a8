"""Somebody who asks a server ten times a second, on a connection of its own each time, while others load it.

    async with probing(place) as probe: ...

A process of its own (`python -m tests.support.load.probe PORT [BODY]`): a client that is busy with streams would
measure itself. It asks until its standard input closes; then it prints what it saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import select
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

_PAUSE_SECONDS = 0.1
_JSON = {"Content-Type": "application/json"}


@dataclass
class Probe:
    """Seconds of each answer, and what was no good one."""

    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def ask(self, port: int, body: str) -> None:
        """For /health/live, or for a completion if there is a body."""
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            if body:
                connection.request("POST", "/v1/completions", body, _JSON)
            else:
                connection.request("GET", "/health/live")
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                self.wrong.append(f"status {answer.status}: {text[-200:]!r}")
        except (OSError, http.client.HTTPException) as error:
            self.wrong.append(repr(error))
        self.seconds.append(time.monotonic() - began)
        connection.close()


@contextlib.asynccontextmanager
async def probing(place: tuple[str, int], fields: dict[str, Any] | None = None) -> AsyncIterator[Probe]:
    """It holds what was seen when the block has ended."""
    probe = Probe()
    words = [str(place[1]), *([json.dumps(fields)] if fields else [])]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, *words), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield probe
    finally:
        seen = json.loads((await process.communicate(b""))[0])
        probe.seconds, probe.wrong = seen["seconds"], seen["wrong"]


def main() -> None:
    probe, port, body = Probe(), int(sys.argv[1]), "".join(sys.argv[2:])
    while True:
        probe.ask(port, body)
        if select.select([sys.stdin], [], [], _PAUSE_SECONDS)[0]:
            print(json.dumps(asdict(probe)))
            return


if __name__ == "__main__":
    main()
