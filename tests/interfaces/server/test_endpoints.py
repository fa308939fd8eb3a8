"""The endpoints that generate nothing; ids, keys, origins and limits around all of them."""

import asyncio
import json
from dataclasses import replace

import httpx2 as httpx
import pytest

from quire.interfaces.gateway import create_app
from quire.interfaces.server import page
from quire.interfaces.server.serving import Readiness
from quire.observability.logging import JsonFormatter
from quire.version import __version__


def test_models(run, served):
    async def main():
        async with served() as server:
            body = (await server.http.get("/v1/models")).json()
            (model,) = body["data"]
            assert body["object"] == "list"
            assert {**model, "created": 0} == {
                "id": "byte-model",
                "object": "model",
                "created": 0,
                "owned_by": "quire",
                "max_model_len": 512,
                "has_chat_template": True,
                "takes_images": False,
                "makes": "text",
                "root": "byte-model",
                "parent": None,
            }
            assert (await server.http.get("/v1/models/byte-model")).json() == model
            models = server.state.models
            models._own = replace(models.own, name="org/name")
            assert (await server.http.get("/v1/models/org/name")).json()["id"] == "org/name"

    run(main())


def test_a_model_answers_to_all_its_names(run, served):
    async def main():
        async with served(model_aliases=("claude-*", "gpt-4o")) as server:
            config = server.engine.config
            names = {"served_model_names": ("byte-model", "other"), "further_model_names": ("folder",)}
            server.engine.config = replace(config, **names)
            listed = (await server.http.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == ["byte-model", "other"]
            for name in ("byte-model", "other", "folder", "claude-4", "gpt-4o"):
                assert (await server.chat(model=name)).json()["model"] == name
                assert (await server.http.get(f"/v1/models/{name}")).json()["parent"] is None
            # each event of the answer would bring it back
            assert (await server.chat(model="claude-" + "x" * 1_000)).status_code == 404
            refused = await server.chat(model="gpt-4")
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "model_not_found"

    run(main())


def test_tokenize_and_back(run, served):
    async def main():
        async with served() as server:
            body = (await server.post("/tokenize", {"prompt": "aü", "return_token_strs": True})).json()
            assert body == {
                "count": 3,
                "max_model_len": 512,
                "tokens": [97, 195, 188],
                "token_strs": ["a", "Ã", "¼"],
            }
            assert (await server.post("/detokenize", {"tokens": [97, 195, 188]})).json() == {"prompt": "aü"}
            assert (await server.post("/tokenize", {})).status_code == 400
            assert (await server.post("/tokenize", {"prompt": "a", "messages": []})).status_code == 400
            assert (await server.post("/detokenize", {"tokens": [10**9]})).status_code == 400

    run(main())


def test_health_while_loading(run):
    async def main():
        app = create_app()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://quire.test") as http:
            for path in ("/health", "/health/ready", "/v1/models"):
                response = await http.get(path)
                assert response.status_code == 503
                assert response.headers["retry-after"]
                assert "loading" in response.json()["error"]["message"]
            for path in ("/health/live", "/version", "/metrics", "/openapi.json"):
                assert (await http.get(path)).status_code == 200, path
            assert (await http.head("/health/live")).status_code == 200
            assert (await http.get("/version")).json() == {"version": __version__}

    run(main())


ODD_IDS = ["a b", "x" * 129, "\u00e9".encode(), b"a\xf0\x9f\x98\x80", "a;b", ""]


def test_request_ids(run, served):
    async def main():
        async with served() as server:
            response = await server.chat()
            assert response.headers["x-request-id"].startswith("req_")
            for value in ODD_IDS:
                response = await server.http.get("/v1/models", headers=[("x-request-id", value)])
                assert response.headers["x-request-id"].startswith("req_"), value
            for path in ("/health", "/nowhere"):
                response = await server.http.get(path, headers={"x-request-id": "My-1._"})
                assert response.headers.get_list("x-request-id") == ["My-1._"]
            assert "x-request-id" not in (await server.http.get("/health")).headers
        async with served(enable_request_id_headers=True) as server:
            assert (await server.http.get("/health")).headers["x-request-id"].startswith("req_")

    run(main())


def test_equal_ids_of_clients_do_not_meet(run, served):
    async def main():
        async with served() as server:
            body = [{"prompt": "x" * length, "max_tokens": 100, "request_id": "same"} for length in range(1, 51)]
            answers = await asyncio.gather(
                *(server.post("/v1/completions", one, **{"x-request-id": "same"}) for one in body)
            )
            for length, answer in enumerate(answers, start=1):
                assert answer.headers["x-request-id"] == "same"
                assert answer.json()["choices"][0]["text"] == server.texts(1, length)[0]
            assert len({answer.json()["id"] for answer in answers}) == 50

    run(main())


KEYS = ("first-key", "second-key")
# of the page only what every tab needs: it holds no data
PUBLIC = {"/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/version", *page.PATHS}
BAD_AUTHORIZATIONS = [
    [],
    [("authorization", "Bearer wrong")],
    [("authorization", "Bearer first-key ")],
    [("authorization", "Bearer first-key,second-key")],
    [("authorization", "Basic first-key")],
    [("authorization", "first-key")],
    [("authorization", "")],
    [("authorization", "Bearer ")],
    [("authorization", b"Bearer \xff")],
    [("authorization", "Bearer first-key"), ("authorization", "Bearer wrong")],
]


def routes_of(app):
    for route in app.routes:
        for method in sorted(getattr(route, "methods", None) or {"GET"}):
            yield method, route.path.replace("{model_id:path}", "byte-model")


@pytest.mark.parametrize("headers", BAD_AUTHORIZATIONS)
def test_every_route_but_the_public_ones_needs_a_key(run, served, headers):
    async def main():
        async with served(api_keys=KEYS) as server:
            routes = [*routes_of(server.app), ("GET", "/nowhere"), ("POST", "//v1/models"), ("GET", "/V1/models")]
            assert len(routes) > 10
            for method, path in routes:
                response = await server.http.request(method, path, headers=headers)
                if path in PUBLIC:
                    assert response.status_code == 200
                else:
                    assert response.status_code == 401, path
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert response.headers["x-request-id"]
                    assert "key" not in response.headers
                    assert "first-key" not in response.text

    run(main())


@pytest.mark.parametrize("host", ["x/health?", "a#", "//", "x/v1/models?"])
def test_a_forged_host_opens_nothing(run, served, host):
    async def main():
        async with served(api_keys=KEYS) as server:
            for path in ("/v1/models", "/metrics", "/tokenize"):
                response = await server.http.get(path, headers={"host": host})
                assert response.status_code == 401

    run(main())


@pytest.mark.parametrize("key", KEYS)
def test_a_key_opens(run, served, key):
    async def main():
        async with served(api_keys=KEYS) as server:
            headers = {"authorization": f"Bearer {key}"}
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
            assert (await server.http.get("/nowhere", headers=headers)).status_code == 404

    run(main())


def test_other_origins_are_not_invited(run, served):
    origin = {"origin": "https://evil.example", "access-control-request-method": "POST"}

    async def main():
        async with served() as server:
            response = await server.http.options("/v1/chat/completions", headers=origin)
            assert response.status_code == 405
            assert not [name for name in response.headers if name.startswith("access-control")]
        async with served(allowed_origins=["https://good.example"], api_keys=KEYS) as server:
            response = await server.http.options("/v1/chat/completions", headers=origin)
            assert response.status_code == 400
            good = {**origin, "origin": "https://good.example"}
            response = await server.http.options("/v1/chat/completions", headers=good)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "https://good.example"

    run(main())


def test_the_page_makes_no_html_of_texts():
    ways = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")
    found = [(path, way) for path, file in page.ASSETS.items() for way in ways if way in file.content.decode()]
    assert found == []
    assert len(page.ASSETS) > 20


def test_a_page_elsewhere_can_send_no_form(run, served):
    """Before a form, an upload or an empty POST no browser asks; JSON is asked for, and refused there."""
    upload = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}

    async def main():
        async with served(allowed_origins=["https://good.example"], is_local=True) as server:
            for origin, status in (
                ("https://evil.example", 403),
                ("null", 403),
                ("https://good.example", 200),
                ("http://localhost:8000", 200),
                (None, 200),
            ):
                headers = {"host": "localhost:8000", **({"origin": origin} if origin else {})}
                answer = await server.http.post("/v1/files", headers=headers, **upload)
                assert answer.status_code == status, origin
                answer = await server.http.post("/v1/admin/requests/none/abort", headers=headers)
                assert answer.status_code == (404 if status == 200 else 403), origin

    run(main())


@pytest.mark.parametrize("headers", [[(f"x-{i}", "1") for i in range(101)], [("x-long", "y" * 65_536)]])
def test_too_many_headers(run, served, headers):
    async def main():
        async with served() as server:
            response = await server.http.get("/health", headers=headers)
            assert response.status_code == 431
            assert response.json()["error"]["type"] == "invalid_request_error"

    run(main())


def metric(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return float(line.rpartition(" ")[2])


def test_metrics(run, served):
    async def main():
        async with served() as server:
            await server.chat("Hi", max_tokens=4)
            await server.chat("Hi")
            await server.chat("Hi", temperature=-1)
            response = await server.http.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            label = '{model_name="byte-model"}'
            generated = 4 + len(server.texts(1, 5)[0].encode()) + 1
            assert metric(response.text, f"quire:prompt_tokens_total{label}") == 10
            assert metric(response.text, f"quire:generation_tokens_total{label}") == generated
            assert metric(response.text, f"quire:time_to_first_token_seconds_count{label}") == 2
            assert metric(response.text, f"quire:inter_token_latency_seconds_count{label}") == generated - 2
            assert metric(response.text, 'quire:request_success_total{finished_reason="length"') == 1
            assert metric(response.text, 'quire:request_success_total{finished_reason="stop"') == 1
            assert metric(response.text, f"quire:num_requests_running{label}") == 0
            assert metric(response.text, f"quire:kv_cache_usage_perc{label}") == 0.25
            assert metric(response.text, f"quire:engine_sequences_aborted{label}") == 0
            route = 'route="/v1/chat/completions"'
            assert (
                metric(response.text, f'quire:http_responses_total{{model_name="byte-model",{route},status="400"}}')
                == 1
            )
            assert "process_resident_memory_bytes" in response.text

    run(main())


def test_who_is_refused_at_the_door_stands_in_the_log_with_where_it_wanted_to_go(run, served, caplog):
    caplog.set_level("INFO", "quire.server.access")

    async def main():
        async with served(api_keys=["secret"]) as server:
            key = {"authorization": "Bearer secret"}
            assert (await server.http.get("/v1/models/byte-model")).status_code == 401
            assert (await server.http.get("/v1/nowhere")).status_code == 401
            server.state.serving.readiness = Readiness.STARTING
            assert (await server.http.post("/v1/completions", json={}, headers=key)).status_code == 503
            counted = server.state.metrics.http_responses
            assert counted.value("/v1/completions", "503") == counted.value("none", "401") == 1

    run(main())
    lines = [record for record in caplog.records if record.name == "quire.server.access"]
    said = [" ".join(record.getMessage().split()[:3]) for record in lines]
    assert said == ["GET /v1/models/{model_id:path} 401", "GET none 401", "POST /v1/completions 503"]
    assert [(record.fields["route"], record.fields["status"]) for record in lines][1:] == [
        ("none", 401),
        ("/v1/completions", 503),
    ]
    assert all(record.getMessage().endswith(record.fields["client"]) for record in lines)


def test_each_request_leaves_one_line_with_its_tokens_and_times(run, served, caplog):
    caplog.set_level("INFO", "quire.server.access")

    async def main():
        async with served(api_keys=["secret"]) as server:
            server.http.headers["authorization"] = "Bearer secret"
            whole = (await server.chat(max_tokens=9)).json()["usage"]
            await server.chat(max_tokens=9, stream=True)
            several = (await server.complete(["Hi", "Hello"], n=2)).json()["usage"]
            await server.http.get("/v1/models")
            await server.http.get("/health")
            return whole, several

    whole, several = run(main())
    lines = [record for record in caplog.records if record.name == "quire.server.access"]
    fields = [json.loads(JsonFormatter().format(line)) for line in lines]
    assert [one["route"] for one in fields] == ["/v1/chat/completions"] * 2 + ["/v1/completions", "/v1/models"]
    for one, usage in zip(fields, (whole, whole, several), strict=False):
        assert (one["prompt_tokens"], one["generated_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert one["model"] == "byte-model"
        assert 0 <= one["queue_seconds"] <= one["seconds"]
        assert 0 <= one["prefill_seconds"] <= one["seconds"]
    assert all(one["client"] and one["tenant"] for one in fields)
    assert "prompt_tokens" not in fields[-1]
    assert f"({whole['prompt_tokens']} tokens in, {whole['completion_tokens']} out, " in lines[0].getMessage()
    assert not any("secret" in line.getMessage() for line in lines)


def test_two_servers_count_apart(run, served):
    async def main():
        async with served() as one, served() as other:
            await one.chat()
            assert other.state.metrics.prompt_tokens.value() == 0

    run(main())
