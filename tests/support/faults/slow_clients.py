"""Clients that read slowly, or not at all, or that have fallen silent (F12, F13). Nobody else notices them, they cost
little, and they are given up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil
from tests.support.faults import disconnects
from tests.support.faults.case import Case, Figures
from tests.support.faults.silent_proxy import SilentProxy
from tests.support.faults.stage import FaultedServer, Setting, under_streams
from tests.support.faults.streams import PROMPTS, LiveStreams

# Slow steps: what is measured is waiting, not how many events a machine can send.
_STEP_SECONDS = 0.05
# its events are more than all buffers on the way to a client hold
_SLOW_TOKENS = 1000
_TEXT_KIB = 4 * _SLOW_TOKENS / 1024
# over how long the slow clients come, and how long the others are watched before that
_ARRIVAL_SECONDS = 20.0
_BEFORE_SECONDS = 20.0
_MOST_SECONDS = 200.0
_SILENT_TOKENS = 8000


async def slow_readers(setting: Setting) -> Figures:
    """Half of them read a byte a second. First half as many come as the setting says, and when all are given up, as
    many as it says, for as long as it says.

    So a client takes what the second half takes beside the first one: what a server takes once, however many come, is
    no client's.
    """
    async with under_streams(setting, PACED_STEP_SECONDS=str(_STEP_SECONDS)) as (server, streams):
        num_first = setting.num_slow_readers
        streams.gaps.clear()
        await asyncio.sleep(min(_BEFORE_SECONDS, setting.slow_seconds))
        usual = _p99(streams.gaps)
        streams.gaps.clear()
        began = time.monotonic()
        rounds = [await _round(server, streams, setting, num_first, 0)]
        num_come = num_first
        while time.monotonic() - began < setting.slow_seconds or len(rounds) < 2:
            rounds.append(await _round(server, streams, setting, 2 * num_first, num_come))
            num_come += 2 * num_first
        most = max(memory for memory, _ in rounds[1:])
        return {
            "inter-token p99, times as before": _p99(streams.gaps) / usual,
            "inter-token p99": _p99(streams.gaps),
            "memory a client, KiB": (most - rounds[0][0]) / 1024 / num_first,
            "given up": max(waited for _, waited in rounds),
            "given up, clients": num_come,
        }


async def _round(
    server: FaultedServer, streams: LiveStreams, setting: Setting, count: int, num_before: int
) -> tuple[int, float]:
    """(most memory while so many came and were given up, how long after the last one). Others came before."""
    process = psutil.Process(server.pid)
    most = 0
    async with _slow_clients(streams.url, setting, count) as last:
        while await streams.metric("quire:requests_aborted_total") < num_before + count:
            most = max(most, process.memory_info().rss)
            assert time.monotonic() - last < _MOST_SECONDS, "slow clients are not given up"
            await asyncio.sleep(0.25)
        return most, time.monotonic() - last


@contextlib.asynccontextmanager
async def _slow_clients(url: str, setting: Setting, count: int) -> AsyncIterator[float]:
    """They come one after the other; then, when the last one came."""
    connections: list[socket.socket] = []
    reader = asyncio.create_task(_read_slowly(connections))
    try:
        for _ in range(count):
            connection = await asyncio.to_thread(disconnects.connect, url, is_narrow=True)
            disconnects.send(connection, stream=True, max_tokens=_SLOW_TOKENS)
            connection.setblocking(False)
            connections.append(connection)
            await asyncio.sleep(min(_ARRIVAL_SECONDS, setting.slow_seconds) / count)
        yield time.monotonic()
    finally:
        reader.cancel()
        for connection in connections:
            connection.close()


async def _read_slowly(connections: list[socket.socket]) -> None:
    """A byte a second from every second one."""
    while True:
        for connection in connections[::2]:
            with contextlib.suppress(OSError):
                connection.recv(1)
        await asyncio.sleep(1)


def _p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


async def half_open_connections(setting: Setting) -> Figures:
    """Streams through a proxy that falls silent in their middle, while others go on."""
    quiet = replace(setting, num_streams=0)
    async with under_streams(quiet, PACED_STEP_SECONDS="0.02") as (_, streams), SilentProxy(streams.url) as proxy:
        connections = [await asyncio.to_thread(_stream, proxy.url) for _ in range(setting.num_half_open)]
        proxy.fall_silent()
        began = time.monotonic()
        held, aborted = await _held(streams)
        assert held > 0, "the streams hold no blocks"
        while held or aborted < setting.num_half_open:
            assert time.monotonic() - began < _MOST_SECONDS, f"{setting.num_half_open - aborted:.0f} streams still run"
            await asyncio.sleep(0.25)
            held, aborted = await _held(streams)
        took = time.monotonic() - began
        for connection in connections:
            connection.close()
        assert (await streams.ask(PROMPTS[0])).text == streams.history.right[PROMPTS[0]]
    return {"blocks back": took, "given up, clients": aborted}


def _stream(url: str) -> socket.socket:
    """In its middle."""
    connection = disconnects.connect(url)
    disconnects.send(connection, stream=True, max_tokens=_SILENT_TOKENS)
    disconnects.after_events(connection, 2)
    return connection


async def _held(streams: LiveStreams) -> list[float]:
    return await streams.metrics("quire:kv_cache_blocks_held", "quire:requests_aborted_total")


_SLOW_GOALS = {
    "inter-token p99, times as before": 1.5,
    "memory a client, KiB": 64 + _TEXT_KIB,
    # the time in which nothing could be sent, and before that the time in which buffers were filled
    "given up": 60.0 + 30.0,
}
CASES = (
    Case("F12", "clients that read slowly or nothing", slow_readers, _SLOW_GOALS, times=1),
    Case("F13", "half-open connections", half_open_connections, {"blocks back": 90.0}, times=1),
)
