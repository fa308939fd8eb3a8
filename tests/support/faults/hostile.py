"""Requests and files that were made to hurt, by the thousand, beside clients that mean well (H1 to H5).

Each follows from its seed, which an error names: `--only H2 --seed N --hostile 1` does that one again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import httpx2 as httpx
import psutil
from tests.support.faults import hostile_bodies, hostile_forms, hostile_images, hostile_sockets, turn_clock
from tests.support.faults.case import Case, Core, Figures
from tests.support.faults.disconnects import address_of
from tests.support.faults.history import FINISHED
from tests.support.faults.stage import FaultedServer, Setting, check, private_folder, until
from tests.support.faults.start_up import fails, model_in
from tests.support.faults.streams import PROMPTS, LiveStreams
from tests.support.template_bombs import BOMBS as TEMPLATES
from tests.support.tokenizer_bombs import BOMBS as TOKENIZERS

from quire.testing.image_checkpoints import make_image_checkpoint

_SECONDS = 240.0
_NUM_STREAMS = 4
# hostile requests at a time
_NUM_AT_ONCE = 4
# how much of all requests are forms: they are computed, and take the longest
_SHARE_OF_FORMS, _SHARE_OF_SOCKETS = 0.02, 0.5
# of images: some take a second each
_SHARE_OF_IMAGES = 0.05
_MOST_DESCRIPTORS = 150
_MEMORY = 256 << 20
_MOST_ANSWER = 8 << 10
_PHASES = 6
# what they make holds blocks until it is deleted
_KEEPS_BLOCKS = ("/v1/sessions", "/v1/admin/pinned_prefixes")


@contextlib.asynccontextmanager
async def _beside(setting: Setting, *options: str, **more: str) -> AsyncIterator[tuple[FaultedServer, LiveStreams]]:
    """A server with a few streams. At the end the same engine runs, nothing is held, and the server ends in order."""
    with private_folder() as folder, FaultedServer(setting, folder, *options, **more) as server:
        url = await asyncio.to_thread(server.wait_ready)
        history = setting.history()
        async with LiveStreams(url, min(setting.num_streams, _NUM_STREAMS), history) as streams:
            engine = server.engine_pid()
            yield server, streams
            streams.finish()
            await streams.wait_finished()
            assert server.engine_pid() == engine, "the engine was ended"
            names = ("quire:engine_restarts_total", "quire:num_requests_running", "quire:kv_cache_blocks_held")
            held = dict(zip(names, await streams.metrics(*names), strict=True))
            assert not any(held.values()), held
        check(history)
        processes = server.descendants()
        server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait) == 0, "the server did not end in order"
        await until(lambda: not any(process.is_running() for process in processes))
        assert not server.left_behind(), server.left_behind()


async def _all(seeds: range, do: Callable[[int], Awaitable[None]], at_once: int) -> None:
    """For each seed, so many at a time."""
    left = iter(seeds)

    async def work() -> None:
        for seed in left:
            try:
                await do(seed)
            except Exception as error:
                error.add_note(f"seed {seed}")
                raise

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())


def _seeds(setting: Setting, share: float) -> range:
    return range(setting.seed, setting.seed + max(1, round(setting.num_hostile * share)))


# ---- H1: forms


async def hard_forms(setting: Setting) -> Figures:
    """In turns with as many requests that are bound to nothing, so that the machine's own moods even out."""
    seeds, ends = _seeds(setting, _SHARE_OF_FORMS), Counter[str]()
    gaps: dict[bool, list[float]] = {False: [], True: []}
    async with _beside(setting) as (_, streams), httpx.AsyncClient(timeout=300) as client:

        async def ask(seed: int, *, is_bound: bool) -> None:
            body = hostile_forms.request_of(seed, is_bound=is_bound)
            answer = await client.post(f"{streams.url}/v1/completions", json=body)
            end = _end_of(answer)
            assert is_bound or end == "answered", answer.text[:400]
            assert end != "wrong", f"{answer.status_code} {answer.text[:400]} to {json.dumps(body)[:400]}"
            ends[end] += is_bound

        step = max(1, len(seeds) // _PHASES)
        for start in range(seeds.start, seeds.stop, step):
            part = range(start, min(start + step, seeds.stop))
            for is_bound in (False, True):
                streams.gaps.clear()
                await _all(part, functools.partial(ask, is_bound=is_bound), _NUM_AT_ONCE)
                gaps[is_bound] += streams.gaps
    late = {is_bound: _at(values, 0.99) for is_bound, values in gaps.items()}
    return {
        "between tokens at p99, times": late[True] / late[False],
        "between tokens at p99": late[True],
        "longest between tokens": max(gaps[True]),
        "answered, requests": ends["answered"],
        "refused, requests": ends["refused"],
    }


def _end_of(answer: httpx.Response) -> str:
    """A client's fault is told with a status of 400 or, in mid-stream, an event of that class."""
    if answer.status_code != 200:
        return "refused" if answer.status_code < 500 else "wrong"
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return "answered"
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    errors = [event["error"] for event in events if "error" in event]
    if not errors:
        return "answered" if answer.text.rstrip().endswith("[DONE]") else "wrong"
    return "refused" if errors[0]["type"] == "invalid_request_error" else "wrong"


def _at(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


# ---- H2: bodies


async def hostile_bodies_case(setting: Setting) -> Figures:
    seeds = _seeds(setting, 1 - _SHARE_OF_FORMS - _SHARE_OF_SOCKETS)
    statuses, asked = Counter[int](), list[float]()
    with private_folder() as folder:
        turns = folder / "turns.json"
        more = {"prelude": "import tests.support.faults.turn_clock", turn_clock.VARIABLE: str(turns)}
        storage = f"sqlite:///{folder}/data/quire.db"
        async with (
            _beside(setting, "--storage-url", storage, **more) as (server, streams),
            httpx.AsyncClient(timeout=120) as client,
        ):
            paths = await _paths_with_bodies(client, streams.url)

            async def ask(seed: int) -> None:
                path, body = hostile_bodies.body_of(seed, paths)
                head = {"content-type": "application/json"}
                answer = await client.post(streams.url + path, content=body, headers=head)
                assert answer.status_code < 500, f"{answer.status_code} {answer.text[:400]} to {path} {body[:200]!r}"
                statuses[answer.status_code] += 1
                if path in _KEEPS_BLOCKS and answer.is_success:
                    made = answer.json()
                    await client.delete(f"{streams.url}{path}/{made.get('id') or made['name']}")

            server.signal(signal.SIGUSR1)
            async with _asking(streams, asked):
                await _all(seeds, ask, _NUM_AT_ONCE)
            server.signal(signal.SIGUSR2)
            await until(turns.exists)
        told = json.loads(turns.read_text(encoding="utf-8"))
    if told["longest"] > _TURNS["longest turn"]:
        print(*told["what"], sep="\n", flush=True)
    return {
        "longest turn": told["longest"],
        "turn at p99.9": told["p999"],
        "live answers at p99": _at(asked, 0.99),
        "answered with 200, requests": statuses[200],
        "refused, requests": statuses.total() - statuses[200],
    }


async def _paths_with_bodies(client: httpx.AsyncClient, url: str) -> list[str]:
    """All that the server says of itself; what stands in braces is nobody's."""
    described = (await client.get(f"{url}/openapi.json")).json()["paths"]
    paths = [path.partition("{")[0] + "x" * ("{" in path) + path.partition("}")[2] for path in described
             if "post" in described[path]]  # fmt: skip
    # who may administrate may put the engine to sleep: that ends requests, as it should
    return sorted(set(paths) - {"/v1/files", "/sleep"})


@contextlib.asynccontextmanager
async def _asking(streams: LiveStreams, asked: list[float]) -> AsyncIterator[None]:
    """Whether the server lives, again and again, and how long the answers take."""

    async def ask() -> None:
        while True:
            began = time.monotonic()
            assert (await streams.get("/health/live")).status_code == 200
            asked.append(time.monotonic() - began)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(ask())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# ---- H3: raw connections


async def raw_connections(setting: Setting) -> Figures:
    seeds = _seeds(setting, _SHARE_OF_SOCKETS)
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({_MOST_DESCRIPTORS},) * 2)"
    async with _beside(setting, "--first-byte-seconds", "2", "--keep-alive-seconds", "5", prelude=limit) as (
        _,
        streams,
    ):
        # in a process of their own: what means well writes as soon as it is connected
        with ProcessPoolExecutor(1, get_context("spawn")) as attacker:
            attack = functools.partial(hostile_sockets.left_open, address_of(streams.url), seeds)
            left_open = await asyncio.get_running_loop().run_in_executor(attacker, attack)
        began = time.monotonic()
        record = await streams.ask(PROMPTS[0])
        assert record.end == FINISHED, record
        figures = {"answer afterwards": time.monotonic() - began}
    assert not left_open, f"{len(left_open)} connections were left open: seeds {left_open[:20]}"
    return {**figures, "connections, requests": len(seeds)}


# ---- H4: files of models


async def bombs_in_templates(setting: Setting) -> Figures:
    """Each serves, refuses what it cannot render, lives meanwhile, and takes no memory."""
    slowest, most, asked = 0.0, 0, list[float]()
    names = _chosen(TEMPLATES, setting)
    for name in names:
        with private_folder() as folder:
            (folder / "bomb.jinja").write_text(TEMPLATES[name], encoding="utf-8")
            model = model_in(folder)
            (model / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
            with FaultedServer(setting, folder, str(model)) as server:
                url = await asyncio.to_thread(server.wait_ready)
                async with LiveStreams(url, 1, setting.history()) as streams:
                    before = psutil.Process(server.pid).memory_info().rss
                    async with _asking(streams, asked), _highest(server.pid) as highest:
                        began = time.monotonic()
                        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
                        status, text = await streams.post("/v1/chat/completions", chat)
                        slowest = max(slowest, time.monotonic() - began)
                    assert status == 400, f"{name}: {status} {text[:400]}"
                    most = max(most, highest[0] - before)
                    assert most < _MEMORY, f"{name} took {most >> 20} MiB"
    return {"it is told": slowest, "live answers at p99": _at(asked, 0.99), "memory, KiB": most >> 10}


async def bombs_in_tokenizers(setting: Setting) -> Figures:
    """None is served."""
    slowest = 0.0
    for name in _chosen(TOKENIZERS, setting):
        with private_folder() as folder:
            model, bomb = model_in(folder), TOKENIZERS[name]
            text = bomb if isinstance(bomb, str) else json.dumps(bomb)
            (model / "tokenizer.json").write_text(text, encoding="utf-8")
            slowest = max(slowest, (await fails(folder, [str(model), "--port", "0"], "tokenizer.json"))["exit"])
    return {"exit": slowest}


# ---- H5: images


async def hostile_images_case(setting: Setting) -> Figures:
    """A model that sees images: each is answered or refused, beside streams of text."""
    seeds, statuses, asked = _seeds(setting, _SHARE_OF_IMAGES), Counter[int](), list[float]()
    # its answers are not those of the model that the other cases serve
    setting = replace(setting, right_answers={True: {}, False: {}})
    with private_folder() as folder:
        model = await asyncio.to_thread(make_image_checkpoint, folder / "vision")
        await asyncio.to_thread(hostile_images.make_all)
        turns = folder / "turns.json"
        more = {"prelude": "import tests.support.faults.turn_clock", turn_clock.VARIABLE: str(turns)}
        async with (
            _beside(setting, str(model), "--dtype", "float32", **more) as (server, streams),
            httpx.AsyncClient(timeout=300) as client,
        ):

            async def ask(seed: int) -> None:
                path, body = hostile_images.request_of(seed)
                answer = await client.post(streams.url + path, json=body)
                assert answer.status_code in (200, 400, 413), f"{answer.status_code} {answer.text[:400]} to {path}"
                assert len(answer.content) < _MOST_ANSWER, answer.text[:400]
                statuses[answer.status_code] += 1

            # the first image starts the process that decodes
            await ask(seeds.start)
            before = _memory_below(server.pid)
            server.signal(signal.SIGUSR1)
            async with _asking(streams, asked), _highest(server.pid, _memory_below) as highest:
                await _all(seeds, ask, _NUM_AT_ONCE)
            server.signal(signal.SIGUSR2)
            await until(turns.exists)
        told = json.loads(turns.read_text(encoding="utf-8"))
    taken = highest[0] - before
    assert taken < _MEMORY, f"{taken >> 20} MiB"
    if told["longest"] > _TURNS["longest turn"]:
        print(*told["what"], sep="\n", flush=True)
    return {
        "longest turn": told["longest"],
        "turn at p99.9": told["p999"],
        "live answers at p99": _at(asked, 0.99),
        "memory, KiB": taken >> 10,
        "answered with 200, requests": statuses[200],
        "refused, requests": statuses.total() - statuses[200],
    }


def _memory_below(pid: int) -> int:
    """Of a process and of all that it has started."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


def _memory_of(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def _chosen(bombs: dict[str, Any], setting: Setting) -> list[str]:
    return random.Random(setting.seed).sample(sorted(bombs), min(setting.num_bombs, len(bombs)))


@contextlib.asynccontextmanager
async def _highest(pid: int, memory: Callable[[int], int] = _memory_of) -> AsyncIterator[list[int]]:
    """The most memory that a process has had meanwhile."""
    highest = [0]

    async def look() -> None:
        for _ in itertools.count():
            highest[0] = max(highest[0], memory(pid))
            await asyncio.sleep(0.01)

    task = asyncio.create_task(look())
    try:
        yield highest
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


_TURNS = {"longest turn": 0.05, "turn at p99.9": 0.02}
CASES = (
    Case("H1", "forms that are hard to follow", hard_forms, {"between tokens at p99, times": 2.0}, 1, Core.EMBEDDED),
    Case("H2", "bodies that take long to read", hostile_bodies_case, _TURNS, 1, Core.EMBEDDED),
    Case("H3", "connections that mean nothing", raw_connections, {"answer afterwards": 5.0}, 1, Core.EMBEDDED),
    Case("H4", "templates of any amount of work", bombs_in_templates, {"it is told": 40.0}, 1, Core.EMBEDDED),
    Case("H4b", "tokenizers of any amount of work", bombs_in_tokenizers, {"exit": 60.0}, 1, Core.EMBEDDED),
    Case("H5", "images that hurt their decoder", hostile_images_case, _TURNS, 1, Core.EMBEDDED),
)
