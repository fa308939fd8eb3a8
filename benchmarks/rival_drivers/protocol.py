"""What a driver and `rivals.py` say to each other: one line of JSON each way, over the driver's stdin and stdout.

A driver is started with one argument, a JSON object (model, precision, threads). It loads its engine once, says
{"ready": seconds, ...} and then answers {"do": "generate", ...} with when the tokens came, until stdin ends. It needs
nothing but its own engine and this file, because it runs in that engine's own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

# one list a request: (seconds after the start, tokens that came then)
Arrivals = list[list[tuple[float, int]]]


class Request:
    """What `rivals.py` asks: requests that arrive together."""

    def __init__(self, command: dict[str, Any]) -> None:
        self.prompts: list[list[int]] = command["prompts"]
        self.output_lengths: list[int] = command["output_lengths"]
        self.num_answers: int = command.get("num_answers", 1)
        self.beam_width: int = command.get("beam_width", 0)


class NotSupportedError(Exception):
    """This engine cannot do it; the text says why."""


class Recorder:
    """Notes tokens as they come; `start` is where the clock starts."""

    def __init__(self, num_requests: int) -> None:
        self.arrivals: Arrivals = [[] for _ in range(num_requests)]
        self.start = time.perf_counter()

    def add(self, request: int, num_tokens: int = 1) -> None:
        if num_tokens:
            self.arrivals[request].append((time.perf_counter() - self.start, num_tokens))


def settings() -> dict[str, Any]:
    """The driver's argument."""
    return json.loads(sys.argv[1])  # type: ignore[no-any-return]


def serve(load: Callable[[dict[str, Any]], tuple[Callable[[Request], Recorder], dict[str, Any]]]) -> None:
    """Runs a driver: `load` returns what answers a request, and facts about the engine such as its version."""
    # Libraries print to stdout as they like; the answers go where it was, and it goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    start = time.perf_counter()
    try:
        generate, facts = load(settings())
    except Exception as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {error}"[:500])
        return
    say(ready=time.perf_counter() - start, **facts)
    for line in sys.stdin:
        request = Request(json.loads(line))
        try:
            recorder = generate(request)
            seconds = time.perf_counter() - recorder.start
        except NotSupportedError as error:
            say(unsupported=str(error))
        except Exception as error:
            traceback.print_exc()
            say(error=f"{type(error).__name__}: {error}"[:500])
        else:
            say(seconds=seconds, arrivals=recorder.arrivals)
