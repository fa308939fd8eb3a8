"""A server on a fake engine, reached without a socket (`client`) or through one (`live`)."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
import uvicorn

from quire.interfaces.gateway import create_app
from quire.interfaces.server.transport.http_protocol import HttpProtocol
from quire.interfaces.server.transport.slow_readers import SlowReaders
from quire.interfaces.server.transport.unfinished import Unfinished
from quire.interfaces.server.transport.web_sockets import web_sockets_of
from quire.testing.fake_engine import FakeAsyncLLM, fake_engine


class Server:
    """An application on a fake engine. Requests go straight into it."""

    def __init__(self, app, engine: FakeAsyncLLM) -> None:
        self.app = app
        self.engine = engine
        self.fake = engine.fake
        self.state = app.state
        self.services = app.state.services
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://quire.test"
        )

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def chat(self, content: str = "Hi", **fields: object) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    async def complete(self, prompt: object = "Hi", **fields: object) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    def requests(self):
        """What reached the engine."""
        return self.fake.requests

    def texts(self, n: int, num_prompt_tokens: int) -> list[str]:
        """What the fake answers to a request of so many tokens."""
        return [f"Answer {index} to {num_prompt_tokens} tokens: grüße 😀 to all." for index in range(n)]


def events_of(text: str) -> list[dict]:
    """The events of a stream, which must end with [DONE]."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture
def run():
    """Runs a coroutine function on a new event loop: `run(test, ...)`."""
    # for what never ends; on busy cores what takes two seconds takes forty
    return lambda main: asyncio.run(asyncio.wait_for(main, 120))


@pytest.fixture
def served(tmp_path: Path):
    """`async with served(...) as server`."""

    @contextlib.asynccontextmanager
    async def make(*, max_model_len=512, generation_config=None, hooks=(), config=None, **options):
        checkpoint = {"max_model_len": max_model_len, "generation_config": generation_config, **(config or {})}
        engine = await fake_engine(tmp_path / "model", hooks, **checkpoint)
        app = create_app(engine, **options)
        server = Server(app, engine)
        try:
            async with server.http:
                yield server
        finally:
            await server.services.stop()
            app.state.services.close()
            engine.shutdown()

    return make


@contextlib.asynccontextmanager
async def on_a_socket(server: Server):
    """Serves the application with uvicorn; yields the base URL."""
    config = uvicorn.Config(
        server.app,
        http=HttpProtocol,
        ws=web_sockets_of(10, Unfinished(), SlowReaders()),
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    uv = uvicorn.Server(config)
    uv.capture_signals = contextlib.nullcontext  # the test runner's signals stay as they are
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(uv.serve(sockets=[listener]))
        host, port = listener.getsockname()
        try:
            yield f"http://{host}:{port}"
        finally:
            uv.should_exit = True
            await task


@pytest.fixture(name="events_of")
def events_of_fixture():
    return events_of


@pytest.fixture
def official():
    """The official client, straight into a server's application."""

    def make(server: Server) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url="http://quire.test/v1", api_key="none", max_retries=0, http_client=server.http
        )

    return make


@pytest.fixture(name="on_a_socket")
def on_a_socket_fixture():
    return on_a_socket
