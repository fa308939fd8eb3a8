"""What whoever runs the server may ask and change: pinned prefixes, and where memory is."""

import asyncio
import contextlib
import logging

import httpx2 as httpx
import pytest

from quire.interfaces.gateway import create_app
from quire.interfaces.server.serving import Readiness
from quire.testing.fake_kept import KEEPING_CORE
from quire.testing.fake_llm import fake_async_llm, fake_renderer

PATH = "/v1/admin/pinned_prefixes"
PREFIX = "You are a helpful assistant.\n"
SIZE = len(fake_renderer().render_prompt(PREFIX).token_ids)


@contextlib.asynccontextmanager
async def keeping(**server_options):
    """A client of a server whose engine keeps what it is told to keep."""
    async with fake_async_llm(core=KEEPING_CORE) as engine:
        transport = httpx.ASGITransport(
            app=create_app(engine, is_local=True, **server_options), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http


def test_a_prefix_comes_is_used_and_goes(run):
    async def main():
        async with keeping() as http:
            assert (await http.get(PATH)).json() == {"object": "list", "data": []}
            made = await http.post(PATH, json={"name": "helpful", "text": PREFIX})
            sizes = {"num_tokens": SIZE, "num_blocks": 1}
            assert made.status_code == 201
            assert made.json() == {
                "object": "pinned_prefix", "name": "helpful", **sizes, "num_hits": 0, "num_hit_tokens": 0,
            }  # fmt: skip
            await http.post("/v1/completions", json={"prompt": PREFIX + "Go.", "max_tokens": 2, "temperature": 0})
            [usage] = (await http.get(PATH)).json()["data"]
            assert (usage["num_hits"], usage["num_hit_tokens"]) == (1, SIZE)
            gone = await http.delete(f"{PATH}/helpful")
            assert gone.json() == {"name": "helpful", "object": "pinned_prefix.deleted", "deleted": True}
            assert (await http.get(PATH)).json()["data"] == []

    run(main())


def test_three_forms_and_a_salt(run):
    async def main():
        async with keeping() as http:
            chat = [{"role": "system", "content": "Be kind."}]
            for body in ({"messages": chat}, {"token_ids": [1, 2, 3]}, {"text": PREFIX, "cache_salt": "mine"}):
                assert (await http.post(PATH, json=body)).status_code == 201
            found = (await http.get(PATH)).json()["data"]
            as_chat = fake_renderer().render_prompt(chat, add_generation_prompt=False).token_ids
            assert [(one["name"], one["num_tokens"]) for one in found] == [
                ("prefix-1", len(as_chat)), ("prefix-2", 3), ("prefix-3", SIZE),
            ]  # fmt: skip
            for salt, hits in ((None, 0), ("mine", 1)):
                body = {"prompt": PREFIX + "Go.", "max_tokens": 1, "cache_salt": salt}
                assert (await http.post("/v1/completions", json=body)).status_code == 200
                assert (await http.get(PATH)).json()["data"][2]["num_hits"] == hits

    run(main())


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({}, 400, "text", None),
        ({"text": "a", "token_ids": [1]}, 400, "text", None),
        ({"text": 5}, 400, "text", None),
        ({"txt": "a"}, 400, "txt", None),
        ({"text": "a", "color": "red"}, 400, "color", None),
        ({"text": ""}, 400, "text", None),
        ({"text": "a", "name": "a/b"}, 400, "name", None),
        ({"text": "a", "name": "taken"}, 409, "name", "prefix_exists"),
        ({"token_ids": [10**9]}, 400, "token_ids", None),
        ({"token_ids": [1] * 300}, 400, "token_ids", "context_length_exceeded"),
    ],
)
def test_what_is_refused(run, body, status, param, code):
    async def main():
        async with keeping() as http:
            await http.post(PATH, json={"name": "taken", "token_ids": [5]})
            response = await http.post(PATH, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (status, param, code)
            assert error["type"] == "invalid_request_error"
            assert len((await http.get(PATH)).json()["data"]) == 1

    run(main())


def test_deleting_what_is_not_there(run):
    async def main():
        async with keeping() as http:
            response = await http.delete(f"{PATH}/nothing")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "prefix_not_found"
            assert (await http.delete(PATH)).status_code == 405

    run(main())


def test_memory(run):
    async def main():
        async with keeping() as http:
            await http.post(PATH, json={"token_ids": [5] * 40})
            body = (await http.get("/v1/admin/memory")).json()
            assert body["object"] == "memory"
            assert body["slots"]["pinned"] == 40
            assert sum(body["slots"].values()) == body["num_blocks"] * body["block_size"]

    run(main())


CALLS = [("GET", PATH), ("POST", PATH), ("DELETE", f"{PATH}/a"), ("GET", "/v1/admin/memory")]


async def statuses(http, key=None, **headers):
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return {(await http.request(method, path, headers=headers)).status_code for method, path in CALLS[::3]}


def test_ordinary_keys_do_not_administrate(run):
    async def main():
        async with keeping(api_keys=["secret"]) as http:
            assert await statuses(http) == {401}
            # without a key for administrators there are no such addresses
            assert await statuses(http, "secret") == {404}
        async with keeping(api_keys=["secret"], admin_api_key="root") as http:
            for key in (None, "secret", "roo", "root "):
                assert await statuses(http, key) == {401}, key
            assert await statuses(http, "root") == {200}
            models = await http.get("/v1/models", headers={"authorization": "Bearer root"})
            assert models.status_code == 200

    run(main())


def test_without_keys_only_the_machine_itself_administrates(run):
    async def main():
        async with keeping() as http:
            for host in ("localhost:8000", "127.0.0.1", "[::1]:80"):
                assert await statuses(http, host=host) == {200}, host
            for host in ("rebound.example", "localhost.example", "", "127.0.0.1@evil", "localhost:8000/x"):
                assert await statuses(http, host=host) == {401}, host
            refused = await http.get("/v1/admin/log_level", headers={"host": "rebound.example"})
            assert "ask it as localhost" in refused.json()["error"]["message"]
            # a proxy on this machine calls it localhost, too
            for name in ("x-forwarded-for", "forwarded", "via", "x-real-ip"):
                assert await statuses(http, host="localhost", **{name: "for=192.0.2.1"}) == {401}, name
        async with keeping(admin_api_key="root") as http:
            assert await statuses(http) == {401}
            assert (await http.get("/v1/models")).status_code == 200, "others need no key"
            assert await statuses(http, "root", host="any.example") == {200}

    run(main())


def test_a_port_of_its_own(run):
    async def main():
        async with fake_async_llm(core=KEEPING_CORE) as engine:
            for key, expected in ((None, {200}), ("root", {401})):
                app = create_app(engine, is_local=True, admin_port=0, admin_api_key=key, api_keys=["secret"])
                transport = httpx.ASGITransport(app=app.state.admin_app, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                    assert await statuses(http) == expected
                    assert await statuses(http, "secret") == expected
                    assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code in (401, 404)
                    assert (await http.get("/health")).status_code == 200
                main_transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=main_transport, base_url="http://localhost") as http:
                    assert await statuses(http, "secret") == {404}
                    assert await statuses(http, key or "x") == {401}

    run(main())


def test_other_administration(run):
    async def main():
        async with keeping() as http:
            reset = await http.post("/v1/admin/reset_prefix_cache")
            assert (reset.status_code, reset.json()["reset"]) == (200, True)
            unknown = await http.post("/v1/admin/requests/req_1/abort")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
            assert (await http.put("/v1/admin/log_level", json={"level": "loud"})).status_code == 400
            before = (await http.get("/v1/admin/log_level")).json()["level"]
            for level in ("debug", before):
                answer = await http.put("/v1/admin/log_level", json={"level": level})
                assert answer.json() == {"object": "log_level", "level": level}
            await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
            [use] = (await http.get("/v1/admin/tenants")).json()["data"]
            assert (use["name"], use["num_accepted"], use["num_requests"]) == ("", 1, 0)
            assert use["num_generated_tokens"] == 2

    run(main())


def test_the_log_level_waits_for_no_engine(run):
    class Told:
        """An engine that hears what it is told, and is too busy to answer."""

        def __init__(self, engine):
            self.engine, self.levels = engine, []

        def __getattr__(self, name):
            return getattr(self.engine, name)

        async def control(self, name, args):
            assert name == "set_log_level"
            self.levels.append(args["level"])
            await asyncio.Event().wait()

    async def main():
        async with fake_async_llm() as engine:
            app, told = create_app(is_local=True, admin_api_key="root"), Told(engine)
            serving = app.state.serving
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            key = {"authorization": "Bearer root"}
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=key) as http:
                before = (await http.get("/v1/admin/log_level")).json()["level"]

                async def change(level):
                    answer = await http.put("/v1/admin/log_level", json={"level": level})
                    assert (answer.status_code, answer.json()) == (200, {"object": "log_level", "level": level})
                    await asyncio.sleep(0)

                try:
                    await change("debug")
                    refused = await http.put("/v1/admin/log_level", headers={"authorization": "Bearer x"}, json={})
                    assert refused.status_code == 401
                    assert (await http.get("/v1/admin/memory")).status_code == 503
                    serving.attach(told)
                    await asyncio.sleep(0)
                    assert told.levels == [logging.DEBUG]
                    await change("error")
                    assert told.levels == [logging.DEBUG, logging.ERROR]
                    serving.readiness = Readiness.RESTARTING
                    await change("warning")
                    assert told.levels == [logging.DEBUG, logging.ERROR]
                    serving.attach(told)
                    await asyncio.sleep(0)
                    assert told.levels == [logging.DEBUG, logging.ERROR, logging.WARNING]
                finally:
                    await http.put("/v1/admin/log_level", json={"level": before})

    run(main())


def test_the_schema_describes_them(run):
    async def main():
        async with keeping() as http:
            whole = (await http.get("/openapi.json")).json()
            paths, schemas = whole["paths"], whole["components"]["schemas"]
            body = paths[PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
            fields = schemas[body["$ref"].rpartition("/")[2]]["properties"]
            assert fields["messages"]["description"] == "the prefix as the first messages of chats"
            assert set(paths[PATH]) == {"get", "post"}
            assert set(paths[PATH + "/{name}"]) == {"delete"}
            assert set(paths["/v1/admin/memory"]) == {"get"}

    run(main())


def test_metrics_count_what_is_pinned(run):
    async def main():
        async with keeping() as http:
            await http.post(PATH, json={"token_ids": [5] * 40})
            text = (await http.get("/metrics")).text
            assert 'quire:num_pinned_prefixes{model_name="quire-embedded"} 1.0' in text

    run(main())
