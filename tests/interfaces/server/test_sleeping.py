"""/sleep, /wake_up and /is_sleeping: the engine's process is gone, requests are told so, and it comes back."""

import asyncio
import contextlib

import httpx2 as httpx
import psutil
import pytest

from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.gateway import create_app
from quire.interfaces.server.process_role import ProcessRole
from quire.interfaces.server.serving import Readiness
from quire.testing.fake_llm import fake_async_llm

COMPLETION = {"prompt": "Once upon", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = {**COMPLETION, "max_tokens": 400, "stream": True}


@contextlib.asynccontextmanager
async def serving(engine: AsyncLLM, **options):
    app = create_app(engine, **{"is_local": True, **options})
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
        yield http, app.state


def engines() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_memory_is_free_until_it_wakes(run):
    async def main():
        others = engines()
        async with AsyncLLM(max_num_seqs=4, num_threads=1, max_model_len=512) as engine, serving(engine) as (http, _):
            await engine.pin_prefix("Once upon a time there was a ship. ", "ship")

            async def text() -> str:
                answer = await http.post("/v1/completions", json=COMPLETION)
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"][0]["text"]

            async def is_sleeping() -> bool:
                return (await http.get("/is_sleeping")).json()["is_sleeping"]

            before = await text()
            first = engines() - others
            assert first
            assert not await is_sleeping()
            running = asyncio.create_task(http.post("/v1/completions", json={**LONG, "stream": False}))
            while not engine.num_open_requests:
                await asyncio.sleep(0)
            assert (await http.post("/sleep?level=1")).json() == {"status": "sleeping", "level": 1}
            assert (await running).status_code == 503
            assert "put to sleep" in (await running).json()["error"]["message"]
            assert not first & engines()
            assert await is_sleeping()
            for path in ("/health", "/v1/completions", "/v1/models"):
                method = http.post if path == "/v1/completions" else http.get
                answer = await method(path, **({"json": COMPLETION} if method == http.post else {}))
                assert answer.status_code == 503
                assert "sleeps until somebody wakes it up" in answer.json()["error"]["message"]
            for path in ("/health/live", "/metrics"):
                assert (await http.get(path)).status_code == 200
            assert (await http.post("/sleep", params={"level": 2})).status_code == 200
            woken = await http.post("/wake_up", params=[("tags", "weights"), ("tags", "kv_cache")])
            assert woken.json() == {"status": "awake", "tags": ["weights", "kv_cache"]}
            assert (await http.post("/wake_up")).json() == {"status": "awake", "tags": None}
            assert (await text(), await is_sleeping()) == (before, False)
            assert [prefix.name for prefix in await engine.pinned_prefixes()] == ["ship"]

    run(main())


def test_what_runs_may_end(run):
    async def main():
        async with fake_async_llm() as engine, serving(engine) as (http, _):
            running = [asyncio.create_task(http.post("/v1/completions", json=COMPLETION)) for _ in range(3)]
            while engine.num_open_requests < 3:
                await asyncio.sleep(0)
            assert (await http.post("/sleep?mode=wait")).status_code == 200
            assert [(await one).status_code for one in running] == [200] * 3
            assert engine.is_asleep

    run(main())


def test_woken_up_while_it_waits_to_sleep(run):
    async def main():
        async with fake_async_llm() as engine, serving(engine) as (http, state):
            running = asyncio.create_task(http.post("/v1/completions", json=COMPLETION))
            while not engine.num_open_requests:
                await asyncio.sleep(0)
            sleeping = asyncio.create_task(http.post("/sleep?mode=wait"))
            while state.serving.readiness is not Readiness.ASLEEP:
                await asyncio.sleep(0)
            assert (await http.post("/wake_up")).status_code == 200
            assert (await sleeping).json()["error"]["code"] == "not_asleep"
            assert (await running).status_code == 200
            assert not engine.is_asleep
            assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200

    run(main())


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("level=0", "level=0: must be 1 or 2"),
        ("level=3", "level=3: must be 1 or 2"),
        ("level=deep", "level='deep'"),
        ("mode=keep", "must be abort or wait"),
    ],
)
def test_refused(run, query, words):
    async def main():
        async with fake_async_llm() as engine, serving(engine) as (http, _):
            answer = await http.post(f"/sleep?{query}")
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
            assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200

    run(main())


def test_only_alone_and_with_the_weights_of_the_files(run):
    async def main():
        async with fake_async_llm() as engine, serving(engine) as (http, state):
            await engine.start()
            engine._parts.weights.version = "mine"
            answer = await http.post("/sleep")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "other_weights")
            state.siblings = object()
            answer = await http.post("/sleep?level=2")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_alone")
            state.siblings = ProcessRole().siblings
            assert (await http.post("/sleep?level=2")).status_code == 200

    run(main())


def test_one_that_cannot_wake_sleeps_on(run):
    async def main():
        async with fake_async_llm() as engine, serving(engine) as (http, state):
            assert (await http.post("/sleep")).status_code == 200
            connect = engine._connect

            def fails(config):
                raise OSError("there is no memory.")

            engine._connect = fails
            answer = await http.post("/wake_up")
            assert answer.status_code == 503
            assert "there is no memory" in answer.json()["error"]["message"]
            assert (state.serving.readiness, engine.is_asleep) == (Readiness.ASLEEP, True)
            engine._connect = connect

    run(main())


def test_nobody_else_may(run):
    async def main():
        async with fake_async_llm() as engine, serving(engine, is_local=False) as (http, _):
            for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
                assert (await http.request(method, path)).status_code in (401, 404)

    run(main())
