"""The server of one engine alone: it has no keys, no queue and no storage, and needs none."""

import subprocess
import sys

import httpx2 as httpx
import pytest

from quire.interfaces.server.app import create_app
from quire.interfaces.server.options import ServerOptions
from quire.testing.fake_engine import fake_engine

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def asked(tmp_path, run):
    """Posts one body to a server without a gateway."""

    def ask(path: str, body: dict, **options) -> httpx.Response:
        async def main() -> httpx.Response:
            engine = await fake_engine(tmp_path / "model")
            app = create_app(engine, ServerOptions(**options))
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            try:
                async with httpx.AsyncClient(transport=transport, base_url="http://quire.test") as http:
                    return await http.post(path, json=body)
            finally:
                engine.shutdown()

        return run(main())

    return ask


def test_it_imports_nothing_of_the_gateway():
    program = (
        "import sys, quire.interfaces.server.app, quire.interfaces.server.http_server\n"
        "quire.interfaces.server.app.create_app()\n"
        "print([name for name in sys.modules if name.startswith(('quire.interfaces.gateway', 'sqlalchemy'))])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_it_answers(asked):
    answer = asked("/v1/chat/completions", CHAT)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert asked("/v1/batches", {}).status_code == 404
    assert asked("/v1/admin/reset_prefix_cache", {}).status_code == 404


def test_a_response_says_that_it_is_not_kept(asked):
    answer = asked("/v1/responses", {"input": "Hi"}).json()
    assert (answer["status"], answer["store"]) == ("completed", False)
    for fields in ({"previous_response_id": "resp_1"}, {"background": True}):
        refused = asked("/v1/responses", {"input": "Hi", **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fields)))


def test_its_time_is_bounded(asked):
    answer = asked("/v1/chat/completions", CHAT, max_request_seconds=0.001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
