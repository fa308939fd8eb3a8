"""/openapi.json says what happens: it is well formed, and real answers, whole, streamed or errors, are as it says."""

import asyncio
import json

import httpx2 as httpx
import jsonschema
import pytest
from fastapi.routing import APIRoute

from quire.interfaces.gateway import create_app
from quire.interfaces.server.access.caller import PUBLIC_PATHS
from quire.interfaces.server.openai.requests import ChatRequest
from quire.interfaces.server.openapi import document
from quire.interfaces.server.wire.api_description import description_of
from quire.testing.fake_kept import KEEPING_CORE
from quire.testing.fake_llm import fake_async_llm

RANKING = {"query": "a", "documents": ["b"]}
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, ANTHROPIC = "/v1/responses", "/v1/messages"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
PREFIXES = "/v1/admin/pinned_prefixes"
# (method, path, path as described, body, status)
EXCHANGES = [
    ("GET", "/health", None, None, 200),
    ("GET", "/health/ready", None, None, 200),
    ("GET", "/health/startup", None, None, 200),
    ("GET", "/health/live", None, None, 200),
    ("GET", "/version", None, None, 200),
    ("GET", "/load", None, None, 200),
    ("GET", "/metrics", None, None, 200),
    ("GET", "/v1/observe/state", None, None, 200),
    ("GET", "/v1/observe/blocks", None, None, 200),
    ("GET", "/v1/observe/decisions", None, None, 200),
    ("GET", "/v1/observe/decisions?since=-1", "/v1/observe/decisions", None, 400),
    ("GET", "/v1/observe/trace", None, None, 200),
    ("GET", "/v1/models", None, None, 200),
    ("GET", "/v1/models/byte-model", "/v1/models/{model_id}", None, 200),
    ("GET", "/v1/models/a/b", "/v1/models/{model_id}", None, 404),
    ("POST", CHAT, None, {"messages": MESSAGES}, 200),
    ("POST", CHAT, None, {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2}, 200),
    ("POST", CHAT, None, {"messages": MESSAGES, "tools": TOOLS, "prompt_logprobs": 1}, 200),
    ("POST", CHAT, None, {"messages": MESSAGES, "stream": True, "logprobs": True}, 200),
    (
        "POST",
        CHAT,
        None,
        {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": True}},
        200,
    ),
    ("POST", CHAT, None, {"messages": MESSAGES, "return_token_ids": True, "echo": True}, 200),
    ("POST", CHAT, None, {"messages": MESSAGES, "return_token_ids": True, "stream": True}, 200),
    ("POST", COMPLETIONS, None, {"prompt": "a", "return_token_ids": True, "stream": True}, 200),
    ("POST", COMPLETIONS, None, {"prompt": "a", "return_token_ids": False}, 200),
    ("GET", "/ping", None, None, 200),
    ("POST", "/ping", None, {}, 200),
    ("POST", "/invocations", None, {"prompt": "a"}, 200),
    ("POST", "/invocations", None, {"model": "a"}, 400),
    ("GET", "/tokenizer_info", None, None, 404),
    ("POST", CHAT, None, {"messages": []}, 400),
    ("POST", CHAT, None, {"messages": MESSAGES, "model": "x"}, 404),
    ("POST", COMPLETIONS, None, {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True}, 200),
    ("POST", COMPLETIONS, None, {"prompt": "a", "prompt_logprobs": 1}, 200),
    ("POST", COMPLETIONS, None, {"prompt": "a", "stream": True, "logprobs": 1}, 200),
    ("POST", COMPLETIONS, None, {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}, 200),
    ("POST", COMPLETIONS, None, {"prompt": "a" * 600}, 400),
    ("POST", RESPONSES, None, {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}, 200),
    ("POST", RESPONSES, None, {"input": "Hi", "max_output_tokens": 2, "metadata": {"a": "b"}}, 200),
    ("POST", RESPONSES, None, {"input": "Hi", "background": True}, 200),
    ("POST", RESPONSES, None, {"input": []}, 400),
    ("POST", RESPONSES + "/input_tokens", None, {"input": "Hi"}, 200),
    ("GET", RESPONSES + "/none", RESPONSES + "/{response_id}", None, 404),
    ("GET", RESPONSES + "/none?stream=true", RESPONSES + "/{response_id}", None, 400),
    ("DELETE", RESPONSES + "/none", RESPONSES + "/{response_id}", None, 404),
    ("POST", RESPONSES + "/none/cancel", RESPONSES + "/{response_id}/cancel", None, 404),
    ("GET", RESPONSES + "/none/input_items", RESPONSES + "/{response_id}/input_items", None, 404),
    ("GET", RESPONSES + "/none/input_items?limit=0", RESPONSES + "/{response_id}/input_items", None, 400),
    ("POST", ANTHROPIC, None, {"messages": MESSAGES, "max_tokens": 9}, 200),
    ("POST", "/api/chat", None, {"model": "byte-model", "messages": MESSAGES}, 200),
    ("POST", "/api/chat", None, {"model": "byte-model", "messages": MESSAGES, "stream": False}, 200),
    ("POST", "/api/chat", None, {"model": "x", "messages": MESSAGES}, 404),
    ("POST", "/api/generate", None, {"model": "byte-model", "prompt": "Hi"}, 200),
    ("POST", "/api/generate", None, {"model": "byte-model", "prompt": "Hi", "stream": False, "logprobs": True}, 200),
    ("POST", "/api/generate", None, {"model": "byte-model", "prompt": "Hi", "think": "x"}, 400),
    ("POST", "/api/embed", None, {"model": "byte-model", "input": []}, 200),
    ("POST", "/api/embeddings", None, {"model": "byte-model", "prompt": ""}, 200),
    ("POST", "/api/show", None, {"model": "byte-model"}, 200),
    ("POST", "/api/pull", None, {"model": "byte-model"}, 200),
    ("POST", "/api/pull", None, {"model": "x"}, 403),
    ("GET", "/api/tags", None, None, 200),
    ("POST", "/completion", None, {"prompt": "Hi", "n_probs": 2}, 200),
    ("POST", "/completion", None, {"prompt": "Hi"}, 200),
    ("POST", "/completion", None, {}, 400),
    ("POST", "/infill", None, {"input_prefix": "a", "input_suffix": "b"}, 400),
    ("POST", "/apply-template", None, {"messages": MESSAGES}, 200),
    ("GET", "/props", None, None, 200),
    ("GET", "/slots", None, None, 200),
    ("GET", "/api/ps", None, None, 200),
    ("GET", "/api/version", None, None, 200),
    ("POST", ANTHROPIC, None, {"messages": MESSAGES}, 400),
    ("POST", ANTHROPIC + "/count_tokens", None, {"messages": MESSAGES}, 200),
    ("POST", ANTHROPIC + "/count_tokens", None, {"messages": MESSAGES, "model": "x"}, 404),
    ("POST", "/v1/embeddings", None, {"input": ["a", "b"]}, 200),
    ("POST", "/v1/embeddings", None, {"input": "a", "encoding_format": "base64"}, 200),
    ("POST", "/v1/embeddings", None, {"input": []}, 400),
    ("POST", "/v2/embed", None, {"texts": ["a", "b"], "embedding_types": ["float", "base64"]}, 200),
    ("POST", "/v2/embed", None, {"texts": []}, 400),
    *(("POST", f"/v1/audio/{kind}", None, {"model": "x"}, 415) for kind in ("transcriptions", "translations")),
    ("POST", "/pooling", None, {"input": "a"}, 200),
    *(("POST", path, None, {"input": "a"}, 400) for path in ("/classify", "/v1/classify")),
    *(("POST", path, None, {"text_1": "a", "text_2": "b"}, 400) for path in ("/score", "/v1/score")),
    *(("POST", f"{version}/rerank", None, RANKING, 400) for version in ("", "/v1", "/v2")),
    ("POST", "/tokenize", None, {"prompt": "a", "return_token_strs": True}, 200),
    ("POST", "/tokenize", None, {"messages": MESSAGES}, 200),
    ("POST", "/tokenize", None, {}, 400),
    ("POST", "/detokenize", None, {"tokens": [97]}, 200),
    ("POST", "/detokenize", None, {"tokens": [-1]}, 400),
]
# of an engine that keeps what it is told to
ADMIN_EXCHANGES = [
    ("POST", "/v1/load_lora_adapter", None, {"lora_name": "a", "lora_path": "a"}, 400),
    ("POST", "/v1/unload_lora_adapter", None, {"lora_name": "a"}, 404),
    ("POST", "/v1/admin/update_weights", None, {"path": "a.safetensors"}, 400),
    ("GET", "/is_sleeping", None, None, 200),
    ("POST", "/sleep?level=3", "/sleep", None, 400),
    ("POST", "/sleep?level=2", "/sleep", None, 200),
    ("POST", "/wake_up?tags=weights", "/wake_up", None, 200),
    ("GET", PREFIXES, None, None, 200),
    ("POST", PREFIXES, None, {"text": "abc", "name": "p"}, 201),
    ("POST", PREFIXES, None, {"text": "abc", "name": "p"}, 409),
    ("POST", PREFIXES, None, {}, 400),
    ("GET", PREFIXES, None, None, 200),
    ("DELETE", PREFIXES + "/p", PREFIXES + "/{name}", None, 200),
    ("DELETE", PREFIXES + "/p", PREFIXES + "/{name}", None, 404),
    ("GET", "/v1/admin/memory", None, None, 200),
    ("POST", "/v1/admin/reset_prefix_cache", None, None, 200),
    ("POST", "/v1/admin/requests/req_1/abort", "/v1/admin/requests/{request_id}/abort", None, 404),
    ("GET", "/v1/admin/tenants", None, None, 200),
    ("PUT", "/v1/admin/log_level", None, {"level": "info"}, 200),
    ("PUT", "/v1/admin/log_level", None, {"level": "loud"}, 400),
    ("GET", "/v1/admin/log_level", None, None, 200),
]


@pytest.fixture(scope="module")
def whole():
    return document(create_app(is_local=True).routes)


def references_in(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references_in(inner)


def resolved(whole, reference):
    found = whole
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def operations_of(whole):
    for path, methods in whole["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_the_document_is_well_formed(whole):
    assert whole["openapi"] == "3.1.0"
    for reference in references_in(whole):
        assert resolved(whole, reference)
    for schema in whole["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = [operation["operationId"] for _, _, operation in operations_of(whole)]
    assert len(names) == len(set(names))
    for method, path, operation in operations_of(whole):
        parameters = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
        assert parameters == {part[1:-1] for part in path.split("/") if part.startswith("{")}, path
        assert operation["summary"]
        assert any(status.startswith("2") for status in operation["responses"]), (method, path)
        assert all(response["description"] for response in operation["responses"].values())


def test_every_endpoint_says_what_it_answers(served, run):
    async def main():
        async with served() as server:
            shown = [route for route in server.app.routes if isinstance(route, APIRoute) and route.include_in_schema]
            assert [route.path for route in shown if description_of(route) is None] == []

    run(main())


def validator_of(whole, schema):
    return jsonschema.Draft202012Validator({**schema, "components": whole["components"]})


def check(whole, operation, response, events_of):
    """That the description covers this answer."""
    described = operation["responses"][str(response.status_code)]
    media_type = response.headers["content-type"].partition(";")[0]
    schema = described["content"][media_type]["schema"]
    assert "x-request-id" in response.headers or response.url.path in PUBLIC_PATHS
    if media_type in ("text/event-stream", "application/x-ndjson"):
        is_lines = media_type == "application/x-ndjson"
        events = [json.loads(line) for line in response.text.splitlines()] if is_lines else events_of(response.text)
        assert events
        for event in events:
            validator_of(whole, schema["x-event"]).validate(event)
            closed(whole, schema["x-event"], event)
    elif media_type == "application/json":
        validator_of(whole, schema).validate(response.json())
        closed(whole, schema, response.json())
    else:
        assert isinstance(response.text, str)


def closed(whole, schema, value):
    """And that the answer says nothing that is not described."""
    while "$ref" in schema:
        schema = resolved(whole, schema["$ref"])
    for choice in schema.get("anyOf", ()):
        if not isinstance(value, dict | list) or validator_of(whole, choice).is_valid(value):
            return closed(whole, choice, value)
    if isinstance(value, dict) and "properties" in schema:
        assert set(value) <= set(schema["properties"]), set(value) - set(schema["properties"])
        for name, inner in value.items():
            closed(whole, schema["properties"][name], inner)
    if isinstance(value, list) and "items" in schema:
        for inner in value:
            closed(whole, schema["items"], inner)
    return None


async def exchange(http, exchanges, events_of):
    """Holds the answers against their descriptions."""
    whole = (await http.get("/openapi.json")).json()
    for method, path, template, body, status in exchanges:
        response = await http.request(method, path, json=body)
        assert response.status_code == status, (method, path, response.text)
        check(whole, whole["paths"][template or path][method.lower()], response, events_of)


def test_real_answers_are_as_described(served, run, events_of):
    async def main():
        async with served() as server:
            await exchange(server.http, EXCHANGES, events_of)

    run(main())


def test_answers_to_whoever_runs_the_server_are_as_described(run, events_of):
    async def main():
        async with fake_async_llm(core=KEEPING_CORE) as engine:
            transport = httpx.ASGITransport(app=create_app(engine, is_local=True), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                await exchange(http, ADMIN_EXCHANGES, events_of)

    run(main())


FILES, BATCHES, SESSIONS = "/v1/files", "/v1/batches", "/v1/sessions"


def test_answers_of_files_and_batches_are_as_described(served, run, events_of):
    async def main():
        async with served() as server:
            http, whole = server.http, document(server.app.routes)
            line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": MESSAGES}}
            form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", json.dumps(line).encode())}}
            for answer in (await http.post(FILES, data={}, files=form["files"]), await http.post(FILES, **form)):
                check(whole, whole["paths"][FILES]["post"], answer, events_of)
            file = answer.json()["id"]
            fields = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
            answer = await http.post(BATCHES, json=fields)
            check(whole, whole["paths"][BATCHES]["post"], answer, events_of)
            batch = answer.json()["id"]
            await asyncio.gather(*server.services.batches._tasks)
            exchanges = [
                ("POST", BATCHES, None, {**fields, "endpoint": "/v1/x"}, 400),
                ("GET", BATCHES, None, None, 200),
                ("GET", f"{BATCHES}/{batch}", BATCHES + "/{batch_id}", None, 200),
                ("GET", f"{BATCHES}/x", BATCHES + "/{batch_id}", None, 404),
                ("POST", f"{BATCHES}/{batch}/cancel", BATCHES + "/{batch_id}/cancel", None, 409),
                ("GET", FILES, None, None, 200),
                ("GET", FILES + "?limit=0", FILES, None, 400),
                ("GET", f"{FILES}/{file}", FILES + "/{file_id}", None, 200),
                ("GET", f"{FILES}/{file}/content", FILES + "/{file_id}/content", None, 200),
                ("DELETE", f"{FILES}/{file}", FILES + "/{file_id}", None, 200),
                ("DELETE", f"{FILES}/{file}", FILES + "/{file_id}", None, 404),
            ]
            await exchange(http, exchanges, events_of)

    run(main())


def test_answers_of_sessions_are_as_described(run, events_of):
    async def main():
        async with fake_async_llm(core=KEEPING_CORE) as engine:
            app = create_app(engine)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://quire.test") as http:
                chat, text = [(await http.post(SESSIONS, json={})).json()["id"] for _ in range(2)]
                turn = {"messages": MESSAGES, "max_tokens": 4}
                one = SESSIONS + "/{session_id}"
                exchanges = [
                    ("POST", SESSIONS, None, {}, 201),
                    ("POST", SESSIONS, None, {"name": "x"}, 400),
                    ("POST", f"{SESSIONS}/{chat}/messages", one + "/messages", turn, 200),
                    ("POST", f"{SESSIONS}/{chat}/messages", one + "/messages", {**turn, "stream": True}, 200),
                    ("POST", f"{SESSIONS}/{text}/completions", one + "/completions", {"prompt": "a"}, 200),
                    ("POST", f"{SESSIONS}/{chat}/completions", one + "/completions", {"prompt": "a"}, 409),
                    ("GET", f"{SESSIONS}/{chat}", one, None, 200),
                    ("GET", SESSIONS, None, None, 200),
                    ("POST", f"{SESSIONS}/{chat}/fork", one + "/fork", None, 201),
                    ("POST", f"{SESSIONS}/{chat}/rewind", one + "/rewind", {"num_turns": 1}, 200),
                    ("POST", f"{SESSIONS}/{chat}/rewind", one + "/rewind", {}, 400),
                    ("DELETE", f"{SESSIONS}/{chat}", one, None, 200),
                    ("DELETE", f"{SESSIONS}/{chat}", one, None, 404),
                ]
                await exchange(http, exchanges, events_of)
            await app.state.services.stop()

    run(main())


def test_every_endpoint_has_an_exchange(whole):
    seen = {(method, template or path) for method, path, template, *_ in (*EXCHANGES, *ADMIN_EXCHANGES)}
    assert {(method, path) for method, path, _ in operations_of(whole)} - seen - ELSEWHERE == set()


# endpoints whose answers are held against their description in a test of their own
ELSEWHERE = {
    ("POST", FILES), ("GET", FILES), ("GET", FILES + "/{file_id}"), ("GET", FILES + "/{file_id}/content"),
    ("DELETE", FILES + "/{file_id}"), ("POST", BATCHES), ("GET", BATCHES), ("GET", BATCHES + "/{batch_id}"),
    ("POST", BATCHES + "/{batch_id}/cancel"), ("POST", SESSIONS), ("GET", SESSIONS),
    *((method, SESSIONS + "/{session_id}") for method in ("GET", "DELETE")),
    *(("POST", SESSIONS + "/{session_id}" + path) for path in ("/messages", "/completions", "/fork", "/rewind")),
}  # fmt: skip


def test_a_wrong_answer_would_be_found(whole):
    operation = whole["paths"][CHAT]["post"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    with pytest.raises(jsonschema.ValidationError):
        validator_of(whole, schema).validate({"id": "x"})
    with pytest.raises(AssertionError):
        closed(whole, {"properties": {"a": {}}}, {"a": 1, "b": 2})


def test_keys_are_described_where_they_are_needed(served, run):
    async def main():
        async with served(api_keys=["secret"]) as server:
            key = {"authorization": "Bearer secret"}
            whole = (await server.http.get("/openapi.json", headers=key)).json()
            assert whole["security"] == [{"key": []}]
            assert whole["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
            assert whole["paths"]["/health"]["get"]["security"] == []
            assert "401" in whole["paths"][CHAT]["post"]["responses"]
            assert "401" not in whole["paths"]["/health"]["get"]["responses"]
        async with served() as server:
            whole = (await server.http.get("/openapi.json")).json()
            assert "security" not in whole
            assert "401" not in whole["paths"][CHAT]["post"]["responses"]

    run(main())


def test_a_body_that_may_be_left_out_is_not_required(whole):
    assert whole["paths"]["/v1/sessions"]["post"]["requestBody"]["required"] is False
    assert whole["paths"][CHAT]["post"]["requestBody"]["required"] is True


def test_fields_are_described_with_their_bounds(whole):
    schema = whole["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"]
    assert set(schema["properties"]) == set(ChatRequest.__struct_fields__)
    temperature = schema["properties"]["temperature"]
    assert temperature["description"] == "0 is greedy"
    assert {"type": "number", "minimum": 0.0, "maximum": 2.0} in temperature["anyOf"]


def test_the_socket_is_described_in_words(whole):
    assert "WebSocket /v1/completions/stream" in whole["info"]["description"]
