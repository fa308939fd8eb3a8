"""`quire bench serve` (W6): a server of its own under requests that arrive at random, as visitors do.

Lengths are those of the batch workload. First all at once, which says how many requests a second the server can bear;
then at shares of that rate, with exponential pauses between arrivals. Everything happens on this machine and ends by
itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import mean
from typing import IO, Any

from quire.config import ModelFacts
from quire.config.engine_options import EngineOptions
from quire.config.model_source import locate
from quire.errors import EngineError, OptionError
from quire.interfaces.cli import bench_workloads as workloads
from quire.interfaces.cli.bench_client import HOST, is_ready, stream_completion
from quire.interfaces.cli.bench_flags import (
    Size,
    add_json_flag,
    add_sizes,
    finish,
    number,
    numbers,
    sizes_of,
    whole_number,
)
from quire.interfaces.cli.bench_numbers import Result
from quire.interfaces.cli.bench_report import Timeline, percentile
from quire.interfaces.cli.bench_sheet import Sheet
from quire.interfaces.cli.bench_start import own_environment
from quire.interfaces.cli.bench_workloads import TokenSource, Work
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of

_SIZES = (
    Size("--num-requests", workloads.BATCH_REQUESTS, 2, "requests at each rate"),
    Size("--input-length", 0, 0, "mean tokens of a prompt; 0: as the workload has it, 161.5"),
    Size("--output-length", 0, 0, "mean tokens of an answer; 0: as the workload has it, 128.9"),
)
_START_SECONDS = 300.0
_END_SECONDS = 10.0
_MOST_REQUESTS = 10_000
_POLL_SECONDS = 0.05


class ServeWorkload:
    """The command."""

    description = "W6: time to first token and between tokens, and goodput, of a server under random arrivals"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s [MODEL] [options]"
        add_model_argument(parser)
        group = parser.add_argument_group("load")
        add_sizes(group, _SIZES)
        group.add_argument(
            "--rates", default="0.5,0.8,1.2", metavar="X,...", help="shares of the capacity (default: %(default)s)"
        )
        group.add_argument(
            "--capacity", metavar="X", help="requests a second; measured if left out, with all requests at once"
        )
        group = parser.add_argument_group("measuring")
        group.add_argument(
            "--good-first-token", default="5", metavar="SECONDS", help="a good answer begins by then (default: 5)"
        )
        group.add_argument(
            "--good-token", default="0.25", metavar="SECONDS",
            help="a good answer takes no longer for each further token, on average (default: 0.25)",
        )  # fmt: skip
        group.add_argument(
            "--max-seconds", default="600", metavar="SECONDS", help="give up a rate after this time (default: 600)"
        )
        group.add_argument("--seed", default="0", metavar="N", help="seed of prompts and arrivals (default: 0)")
        add_json_flag(group)
        add_engine_flags(parser, leave_out=("seed",))

    def run(self, arguments: argparse.Namespace) -> int:
        load = Load(arguments)
        return finish(asyncio.run(load.measure()), arguments)


SERVE = ServeWorkload()


class Load:
    """What is asked of the server, and what came of it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.engine_options = engine_options_of(arguments)
        self.sizes = sizes_of(arguments, _SIZES)
        self.num_requests = self.sizes["num_requests"]
        if self.num_requests > _MOST_REQUESTS:
            raise OptionError(
                f"--num-requests {self.num_requests}: each has a connection of its own, at most {_MOST_REQUESTS} are "
                "allowed."
            )
        self.seed = whole_number("--seed", arguments.seed, 0)
        self.rates = numbers("--rates", arguments.rates)
        self.capacity = number("--capacity", arguments.capacity) if arguments.capacity else None
        self.good_first_token = number("--good-first-token", arguments.good_first_token)
        self.good_token = number("--good-token", arguments.good_token)
        self.max_seconds = number("--max-seconds", arguments.max_seconds)
        self.facts = ModelFacts.read(locate(self.engine_options.get("model", EngineOptions().model)))
        self.sheet = Sheet()

    async def measure(self) -> Result:
        async with running_server(self.engine_options) as port:
            await stream_completion(port, self._work(-1).prompts[0][:64], 4)  # type: ignore[arg-type]
            if self.capacity is None:
                seconds, _ = await self._arrive(port, self._work(0), [0.0] * self.num_requests)
                self.capacity = self.num_requests / seconds
                self.sheet.note("capacity", self.capacity, "requests/s")
            for index, rate in enumerate(self.rates):
                times = arrivals(self.num_requests, rate * self.capacity, self.seed + index)
                seconds, timelines = await self._arrive(port, self._work(1 + index), times)
                self._note(f"{rate:g}x", seconds, timelines)
        settings = {
            "requests": self.num_requests,
            "capacity": round(self.capacity, 4),
            "good first token": self.good_first_token,
            "good token": self.good_token,
            "seed": self.seed,
        }
        name = str(self.engine_options.get("model", EngineOptions().model))
        return Result("W6", "the server under random arrivals", name, settings, self.sheet.measures)

    def _work(self, index: int) -> Work:
        source = TokenSource(self.facts.vocab_size, self.seed, index)
        return workloads.batch(source, **self.sizes)

    async def _arrive(self, port: int, work: Work, times: Sequence[float]) -> tuple[float, list[Timeline]]:
        async def one(prompt: Sequence[int], output_length: int, time_of_arrival: float) -> Timeline:
            await asyncio.sleep(time_of_arrival)
            return await stream_completion(port, list(prompt), output_length)

        start = time.perf_counter()
        jobs = map(one, work.prompts, work.output_lengths, times)
        try:
            timelines = await asyncio.wait_for(asyncio.gather(*jobs), self.max_seconds)
        except TimeoutError:
            raise EngineError(
                f"--max-seconds {self.max_seconds:g}: the requests took longer. Ask for fewer, or allow more."
            ) from None
        return time.perf_counter() - start, list(timelines)

    def _note(self, rate: str, seconds: float, timelines: list[Timeline]) -> None:
        firsts = [timeline.time_to_first_token for timeline in timelines]
        gaps = [gap for timeline in timelines for gap in timeline.gaps]
        note = self.sheet.note
        for share in (50, 99):
            note(f"{rate} first token p{share}", percentile(firsts, share), "s")
        for share in (50, 99):
            note(f"{rate} between tokens p{share}", percentile(gaps, share) * 1e3, "ms")
        note(f"{rate} mean time per token", mean(t.time_per_token or 0.0 for t in timelines) * 1e3, "ms")
        normalized = [timeline.normalized_latency for timeline in timelines if timeline.arrivals]
        note(f"{rate} normalized latency", mean(normalized or [0.0]) * 1e3, "ms")
        note(f"{rate} requests", len(timelines) / seconds, "/s")
        note(f"{rate} goodput", sum(map(self._is_good, timelines)) / seconds, "/s")

    def _is_good(self, timeline: Timeline) -> bool:
        is_soon = timeline.time_to_first_token <= self.good_first_token
        return is_soon and (timeline.time_per_token or 0.0) <= self.good_token


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start; a Poisson process of so many requests a second."""
    draw = random.Random(seed)
    now = 0.0
    times = []
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return times


@asynccontextmanager
async def running_server(engine_options: dict[str, Any]) -> AsyncIterator[int]:
    """Its port, once it answers. It is gone afterwards, whatever happens."""
    with socket.socket() as finder:
        finder.bind((HOST, 0))
        port = finder.getsockname()[1]
    command = ["-m", "quire.interfaces.cli", "serve", "--host", HOST, "--port", str(port), "--config"]
    with tempfile.TemporaryFile() as words, tempfile.NamedTemporaryFile("w", suffix=".yaml") as options:
        json.dump(engine_options, options)
        options.flush()
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, options.name, stdout=words, stderr=words, env=own_environment()
        )
        try:
            await _wait_ready(process, port, words)
            yield port
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), _END_SECONDS)
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def _wait_ready(process: asyncio.subprocess.Process, port: int, words: IO[bytes]) -> None:
    end = time.monotonic() + _START_SECONDS
    while not await is_ready(port):
        if process.returncode is not None or time.monotonic() > end:
            words.seek(0)
            raise EngineError(f"the server did not start. It said:\n{words.read().decode(errors='replace')[-2000:]}")
        await asyncio.sleep(_POLL_SECONDS)
