"""What whoever runs the server may ask and change: pinned prefixes, and where memory is."""

import contextlib

import httpx2 as httpx
import pytest

from quire.interfaces.server import create_app
from quire.testing.fake_kept import KEEPING_CORE
from quire.testing.fake_llm import fake_async_llm, fake_renderer

PATH = "/v1/admin/pinned_prefixes"
PREFIX = "You are a helpful assistant.\n"
SIZE = len(fake_renderer().render_prompt(PREFIX).token_ids)


@contextlib.asynccontextmanager
async def keeping(**server_options):
    """A client of a server whose engine keeps what it is told to keep."""
    async with fake_async_llm(core=KEEPING_CORE) as engine:
        transport = httpx.ASGITransport(app=create_app(engine, **server_options), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://quire.test") as http:
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


def test_the_key_is_needed_here_too(run):
    async def main():
        async with keeping(api_keys=["secret"]) as http:
            calls = [("GET", PATH), ("POST", PATH), ("DELETE", f"{PATH}/a"), ("GET", "/v1/admin/memory")]
            for method, path in calls:
                assert (await http.request(method, path)).status_code == 401
            assert (await http.get(PATH, headers={"authorization": "Bearer secret"})).status_code == 200

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
