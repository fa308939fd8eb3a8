"""`quire route` in front of servers, as a user starts them: what each store carries, and what clients see of losses."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.support import kv_servers
from tests.support.kv_servers import SERVERS
from tests.support.server_process import ServerProcess

QUESTION = {
    "messages": [{"role": "user", "content": "What is seven plus five? Say it in words, and say why that is so."}],
    "temperature": 0,
    "max_tokens": 12,
}
SERVE = (
    "-m quire.interfaces.cli serve --port 0 --num-threads 1 --max-model-len 512 --dtype float32 --device cpu".split()
)


@pytest.fixture(params=["files", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in (*SERVERS, "nixl"))])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Of the prefill and of the decode server."""
    with kv_servers.two_addresses(request.param, tmp_path) as addresses:
        yield addresses


def serve(role: str, store: str) -> ServerProcess:
    return ServerProcess([*SERVE, "--role", role, "--kv-store", store], {"QUIRE_KV_STORE_SECRET": "of a test"})


def route(prefill: str, decode: str) -> ServerProcess:
    command = ["-m", "quire.interfaces.cli", "route", "--port", "0", "--prefill", prefill, "--decode", decode]
    return ServerProcess(command)


def text_of(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in json.loads(event)["choices"])


def number(client: httpx.Client, url: str, name: str) -> float:
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? ([\d.e+]+)$", client.get(f"{url}/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def test_both_halves(stores: tuple[str, str]) -> None:
    with ExitStack() as opened:
        prefill, decode = (
            opened.enter_context(serve(role, store)) for role, store in zip(("prefill", "decode"), stores, strict=True)
        )
        urls = prefill.wait_ready(300), decode.wait_ready(300)
        front = opened.enter_context(route(*urls))
        chats = f"{front.wait_ready()}/v1/chat/completions"
        client = opened.enter_context(httpx.Client(timeout=120))
        whole = client.post(chats, json=QUESTION).json()
        length = whole["usage"]["prompt_tokens"]
        num_blocks = -(-length // 16)
        # computed = L in all, of which none here; moved are the blocks of L
        assert number(client, urls[1], "quire:kv_connector_fetched_tokens_total") == length
        assert number(client, urls[1], "quire:kv_connector_fetched_blocks_total") == num_blocks
        written = number(client, urls[0], "quire:kv_store_written_bytes_total")
        read = number(client, urls[1], "quire:kv_store_read_bytes_total")
        assert written >= read > 0
        streamed = client.post(chats, json={**QUESTION, "stream": True}).text
        alone = client.post(f"{urls[0]}/v1/chat/completions", json=QUESTION).json()
        assert whole["choices"] == alone["choices"]
        assert text_of(streamed) == whole["choices"][0]["message"]["content"]
        # without prefill servers nobody fails
        prefill.signal(signal.SIGKILL)
        prefill.wait()
        other = {**QUESTION, "messages": [{"role": "user", "content": "Is seven a number?"}]}
        assert client.post(chats, json=other).status_code == 200
        assert client.get(f"{front.wait_ready()}/health").json() == {"prefill": 0, "decode": 1}
        # without decode servers there is one error, and the front goes on
        decode.signal(signal.SIGKILL)
        decode.wait()
        lost = client.post(chats, json=QUESTION)
        assert lost.status_code == 503
        assert "no decode server is ready" in lost.json()["error"]["message"]
        front.signal()
        assert front.wait() == 0
        assert "Traceback" not in front.output, front.output
