"""Ollama's API below /api, on a fake engine: lines, whole answers, tools, forms, thoughts, models, and refusals."""

import json

import pytest

from quire.interfaces.server.ollama.fields import OllamaChatRequest, chat_of, seconds_of
from quire.renderer.output_formats import OutputFormats

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
HI = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "byte-model", "messages": HI}
TEXT = {"model": "byte-model", "prompt": "Hi"}


@pytest.fixture
def asked(run, served):
    """Runs a test with a server."""

    def start(test, *, answer="", **options):
        async def main():
            async with served(max_model_len=2048, **options) as server:
                if answer:
                    server.engine.renderer.output_formats = OutputFormats.choose((), tool="hermes", reasoning="think")
                    server.fake.reply_to = lambda request, index: answer
                return await test(server)

        return run(main())

    return start


def lines_of(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def prompt_of(server) -> str:
    return server.engine.renderer.decode(server.requests()[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_chat_in_lines_and_whole(asked):
    async def test(server):
        lines = lines_of(await server.post("/api/chat", CHAT))
        whole = (await server.post("/api/chat", {**CHAT, "stream": False})).json()
        text = "".join(line["message"]["content"] for line in lines)
        assert text
        assert whole["message"] == {"role": "assistant", "content": text}
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        for end in (lines[-1], whole):
            assert (end["done"], end["done_reason"], end["model"]) == (True, "stop", "byte-model")
            assert end["prompt_eval_count"] == len(server.requests()[0].prompt_token_ids)
            assert end["eval_count"] == len(text.encode()) + 1
            assert end["total_duration"] >= end["eval_duration"] > 0
            assert end["created_at"].endswith("Z")

    asked(test)


def test_options_reach_the_engine(asked):
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 4, "stop": "x",
        "repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        # what asks for nothing here
        "num_ctx": 4096, "num_gpu": 1, "repeat_last_n": 64, "mirostat": 0,
    }  # fmt: skip

    async def test(server):
        for path, body in (("/api/chat", CHAT), ("/api/generate", TEXT), ("/api/generate", {**TEXT, "raw": True})):
            lines = lines_of(await server.post(path, {**body, "options": options, "keep_alive": "5m"}))
            sampling = server.requests()[-1].sampling
            assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (7, 0.5, 3)
            assert (sampling.top_p, sampling.min_p, sampling.seed, tuple(sampling.stop)) == (0.9, 0.1, 4, ("x",))
            assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.2, 0.1)
            assert sampling.frequency_penalty == 0.2
            assert lines[-1]["done_reason"] == "length"
        await server.post("/api/chat", {**CHAT, "options": {"num_predict": -1, "seed": -1}})
        sampling = server.requests()[-1].sampling
        assert sampling.seed is None
        assert sampling.max_tokens is None or sampling.max_tokens > 1000

    asked(test)


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/api/chat", {"options": {"temperature": 3}}, "options.temperature=3"),
        ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature: must be a number"),
        ("/api/chat", {"options": {"top_p": 2}}, "options.top_p"),
        ("/api/chat", {"options": {"mirostat": 1}}, "options.mirostat: not supported"),
        ("/api/chat", {"options": {"temprature": 1}}, "temperature"),
        ("/api/chat", {"options": {"repeat_last_n": 3}}, "options.repeat_last_n"),
        ("/api/chat", {"temperature": 1}, "options.temperature"),
        ("/api/chat", {"keep_alive": "soon"}, "keep_alive='soon'"),
        ("/api/chat", {"format": "xml"}, "format='xml'"),
        ("/api/chat", {"think": "hugely"}, "think="),
        ("/api/chat", {"messages": ["Hi"]}, "messages[0]"),
        ("/api/chat", {"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": "b"}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool_calls[0]"),
        ("/api/generate", {"suffix": "b"}, "suffix: not supported"),
        ("/api/generate", {"raw": True, "system": "b"}, "system"),
        ("/api/generate", {"context": [1]}, "context: not supported"),
        ("/api/generate", {"template": "x"}, "template: not supported"),
    ],
)
def test_mistakes_are_named(asked, path, fields, words):
    async def test(server):
        body = {**(CHAT if path.endswith("chat") else TEXT), **fields}
        response = await server.post(path, body)
        assert response.status_code == 400, response.text
        assert list(response.json()) == ["error"]
        assert words in response.json()["error"]
        assert not server.requests()

    asked(test)


def test_calls_and_their_results(asked):
    answer = f"<think>\nHm.\n</think>\n\nI look it up.\n{CALL}\n{CALL}"

    async def test(server):
        body = {**CHAT, "tools": [WEATHER]}
        lines = lines_of(await server.post("/api/chat", body))
        whole = (await server.post("/api/chat", {**body, "stream": False})).json()["message"]
        calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
        function = {"name": "weather", "arguments": {"city": "Zürich"}}
        assert calls == whole["tool_calls"] == [{"function": {"index": index, **function}} for index in (0, 1)]
        assert "".join(line["message"].get("thinking", "") for line in lines) == whole["thinking"] == "Hm."
        assert "".join(line["message"]["content"] for line in lines) == whole["content"] == "I look it up."
        assert lines[-1]["done_reason"] == "stop"
        # two calls of one tool: results in their order
        result = {"role": "tool", "tool_name": "weather", "content": "rain"}
        turn = [*HI, whole, result, {**result, "content": "sun"}]
        assert (await server.post("/api/chat", {**body, "messages": turn})).status_code == 200
        assert prompt_of(server).endswith("<|tool|>rain<|end|><|tool|>sun<|end|>[1 tools]<|assistant|>")

    asked(test, answer=answer)


HUGE = 10**30
ODD_MESSAGES = [
    {},
    {"role": ["user"], "content": "a"},
    {"role": {}, "content": "a"},
    {"role": "user", "content": {"a": 1}},
    {"role": "user", "content": "a", "images": [""]},
    {"role": "user", "content": "a", "images": ["data:"]},
    {"role": "user", "content": "a", "images": ["http://127.0.0.1/a.png"]},
    {"role": "user", "content": ["a"], "images": ["a"]},
    {"role": "tool", "content": "a", "tool_name": {"a": []}},
    {"role": "assistant", "tool_calls": {"function": {}}},
    {"role": "assistant", "tool_calls": [{"id": [], "function": {"name": "a", "arguments": [1]}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": {}, "arguments": "{"}}]},
]
ODD_FIELDS = [
    *({"options": {name: value}} for name in ("num_predict", "top_k", "seed") for value in (HUGE, -HUGE)),
    *({"options": {name: 1e300}} for name in ("temperature", "repeat_penalty", "presence_penalty", "min_p")),
    {"options": {"stop": ["a"] * 100_000}},
    {"options": {"stop": ""}},
    {"options": []},
    {"model": ""},
    {"model": ":latest"},
    {"model": "../../etc/passwd"},
    {"keep_alive": 1e300},
    {"keep_alive": "9" * 100_000},
    {"format": {"type": 7}},
    {"format": {"$ref": "file:///etc/passwd"}},
    {"think": "\u0000"},
    {"logprobs": True, "top_logprobs": HUGE},
    {"logprobs": True, "top_logprobs": -1},
    {"tools": [{}]},
]


def test_nothing_that_a_client_writes_is_the_fault_of_the_server(asked):
    async def test(server):
        chats = [{"messages": [message]} for message in ODD_MESSAGES]
        bodies = [("/api/chat", {**CHAT, **fields}) for fields in (*chats, *ODD_FIELDS)]
        bodies += [("/api/generate", {**TEXT, **raw, **fields}) for fields in ODD_FIELDS for raw in ({}, {"raw": True})]
        bodies += [("/api/embed", {"model": "byte-model", "input": odd}) for odd in ("", [""], [[]], ["a"] * 3000)]
        bodies += [(path, {"model": odd}) for path in ("/api/show", "/api/pull") for odd in ("", "a/" * 5000, "../x")]
        for path, body in bodies:
            response = await server.post(path, {"stream": False, **body})
            assert response.status_code < 500, (path, str(body)[:200], response.text)
            assert response.status_code == 200 or list(response.json()) == ["error"], path

    asked(test)


def test_results_find_their_calls():
    def ids(*tools):
        calls = [{"function": {"name": name}} for name in ("a", "b", "a")]
        results = [{"role": "tool", "tool_name": tool, "content": ""} for tool in tools]
        chat = chat_of(OllamaChatRequest(model="m", messages=[{"role": "assistant", "tool_calls": calls}, *results]))
        return [message["tool_call_id"] for message in chat.messages[1:]]

    assert ids(None, None, None, None) == ["call_0", "call_1", "call_2", "call_unknown"]
    assert ids("a", None, "a", "b") == ["call_0", "call_1", "call_2", "call_unknown"]
    assert ids("b", "c", ["a"], None, None) == ["call_1", "call_unknown", "call_unknown", "call_0", "call_2"]


def test_thoughts_are_switched(asked):
    async def test(server):
        whole = (await server.post("/api/generate", {**TEXT, "think": True, "stream": False})).json()
        assert (whole["thinking"], whole["response"]) == ("Hm.", "Yes.")
        for think in (False, "low"):
            assert (await server.post("/api/generate", {**TEXT, "think": think})).status_code == 200

    asked(test, answer="<think>\nHm.\n</think>\n\nYes.")


def test_forms(asked):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def test(server):
        for form in ("json", schema):
            await server.post("/api/chat", {**CHAT, "format": form})
            found = server.requests()[-1].sampling.structured_outputs
            assert found.json_object if form == "json" else json.loads(found.json) == schema
        await server.post("/api/chat", {**CHAT, "format": ""})
        assert server.requests()[-1].sampling.structured_outputs is None

    asked(test)


def test_texts(asked):
    async def test(server):
        lines = lines_of(await server.post("/api/generate", {**TEXT, "system": "Be kind."}))
        assert prompt_of(server) == "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"
        assert "".join(line["response"] for line in lines)
        await server.post("/api/generate", {**TEXT, "raw": True})
        assert prompt_of(server) == "Hi"

    asked(test)


def test_logprobs(asked):
    async def test(server):
        for body, path in ((CHAT, "/api/chat"), (TEXT, "/api/generate"), ({**TEXT, "raw": True}, "/api/generate")):
            lines = lines_of(await server.post(path, {**body, "logprobs": True, "top_logprobs": 2}))
            found = [entry for line in lines for entry in line.get("logprobs", ())]
            assert len(found) == lines[-1]["eval_count"]
            assert {"token", "logprob", "top_logprobs"} <= found[0].keys()

    asked(test)


def test_vectors(asked):
    """On a real engine: tests/interfaces/test_embeddings.py."""

    async def test(server):
        assert (await server.post("/api/embed", {"model": "byte-model", "input": []})).json()["embeddings"] == []
        assert (await server.post("/api/embeddings", {"model": "byte-model", "prompt": ""})).json() == {"embedding": []}
        refused = await server.post("/api/embed", {"model": "byte-model", "input": "a", "truncate": True})
        assert refused.status_code == 400
        assert refused.json()["error"].startswith("truncate")

    asked(test)


def test_a_body_may_come_without_its_type_but_not_from_a_browser(asked):
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({**TEXT, "stream": False}).encode()

    async def test(server):
        for headers in (form, {"content-type": ""}):
            response = await server.http.post("/api/generate", content=body, headers=headers)
            assert response.status_code == 200, response.text
            assert response.json()["done"]
        num_answered = len(server.requests())
        for name, value in (
            ("origin", "null"),
            ("origin", "https://evil.example"),
            ("origin", f"http://{server.http.base_url.netloc.decode()}"),
            ("referer", "https://evil.example/page"),
            ("sec-fetch-site", "cross-site"),
        ):
            response = await server.http.post("/api/generate", content=body, headers={**form, name: value})
            assert response.status_code in (403, 415), (name, value)
            assert list(response.json()) == ["error"]
        for path, kind in (("/api/generate", "text/plain"), ("/v1/completions", form["content-type"])):
            response = await server.http.post(path, content=body, headers={"content-type": kind})
            assert response.status_code == 415
        assert len(server.requests()) == num_answered

    asked(test)


def test_an_empty_request_loads(asked):
    async def test(server):
        for path in ("/api/chat", "/api/generate"):
            body = (await server.post(path, {"model": "byte-model"})).json()
            assert (body["done"], body["done_reason"]) == (True, "load")
            body = (await server.post(path, {"model": "byte-model", "keep_alive": 0})).json()
            assert body["done_reason"] == "unload"
            assert (await server.post(path, {"model": "other"})).status_code == 404
            for name, value in (("frequency_penalty", 3.0), ("stop", ["x" * 1025])):
                refused = await server.post(path, {"model": "byte-model", "options": {name: value}})
                assert refused.status_code == 400
                assert f"options.{name}" in refused.json()["error"]
        assert not server.requests()

    asked(test)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("-1", -1), ("-1s", -1), ("250ms", 0.25), ("0", 0), (7, 7), (None, None)],
)
def test_times_are_written_as_in_go(written, seconds):
    assert seconds_of(written) == seconds


def test_models(asked):
    async def test(server):
        (listed,) = (await server.http.get("/api/tags")).json()["models"]
        (running,) = (await server.http.get("/api/ps")).json()["models"]
        assert listed["name"] == listed["model"] == running["name"] == "byte-model"
        assert len(listed["digest"]) == 64
        assert running["context_length"] == 2048
        for body in ({"model": "byte-model:latest"}, {"name": "byte-model", "verbose": True}):
            shown = (await server.post("/api/show", body)).json()
            assert "completion" in shown["capabilities"]
            family = shown["details"]["family"]
            assert shown["model_info"][f"{family}.context_length"] == 2048
        assert (await server.http.get("/api/version")).json()["version"]
        assert (await server.post("/api/pull", {"model": "byte-model"})).json() == {"status": "success"}
        refused = await server.post("/api/pull", {"model": "llama3.2"})
        assert refused.status_code == 403
        assert "quire pull llama3.2" in refused.json()["error"]
        for path, body in (("/api/show", {}), ("/api/chat", {"messages": HI}), ("/api/embed", {"input": "a"})):
            missing = await server.post(path, {"model": "llama3.2", **body})
            assert missing.status_code == 404
            assert "llama3.2" in missing.json()["error"]

    asked(test)


CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
ZED = {
    "model": "byte-model",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {**CALLED, "thinking": None},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ],
    "stream": True,
    "keep_alive": -1,
    "options": {"num_ctx": 16384, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None},
    "tools": [WEATHER],
    "think": False,
}
CONTINUE = {
    "model": "byte-model",
    "messages": HI,
    "options": {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "num_predict": 8192, "stop": ["###"], "num_ctx": 8192,
        "num_thread": 4, "use_mmap": True, "min_p": 0.1,
    },
    "keep_alive": 1800,
    "stream": True,
}  # fmt: skip
OPEN_WEBUI = {
    "model": "byte-model:latest",
    "messages": HI,
    "stream": True,
    "options": {
        "temperature": 0.8, "top_k": 40, "repeat_last_n": 64, "tfs_z": 1, "num_ctx": 4096, "num_keep": 24,
        "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "num_batch": 512, "use_mlock": False, "num_gpu": 1,
    },
    "keep_alive": "5m",
    "format": "",
}  # fmt: skip


@pytest.mark.parametrize("body", [ZED, {**ZED, "tools": []}, CONTINUE, OPEN_WEBUI])
def test_what_editors_and_pages_send_is_answered(asked, body):
    async def test(server):
        lines = lines_of(await server.post("/api/chat", body))
        assert lines[-1]["done"]
        assert "".join(line["message"]["content"] for line in lines)

    asked(test)


def test_a_failure_in_a_stream_is_its_last_line(asked):
    async def test(server):
        server.fake.failures[3] = "told to"
        lines = lines_of(await server.post("/api/chat", CHAT))
        assert list(lines[-1]) == ["error"]

    asked(test)


def test_the_python_client(run, served, on_a_socket):
    """The package ollama, where it is installed."""
    client_of = pytest.importorskip("ollama")

    async def calls(client, server):
        whole = await client.chat(model="byte-model", messages=HI, options={"temperature": 0}, keep_alive="5m")
        parts = [part async for part in await client.chat(model="byte-model", messages=HI, stream=True)]
        assert "".join(part.message.content for part in parts) == whole.message.content
        assert parts[-1].done
        assert parts[-1].eval_count == whole.eval_count
        text = await client.generate(model="byte-model", prompt="Hi")
        parts = [part async for part in await client.generate(model="byte-model", prompt="Hi", stream=True)]
        assert "".join(part.response for part in parts) == text.response
        assert (await client.list()).models[0].model == "byte-model"
        assert (await client.ps()).models[0].context_length == 2048
        assert "completion" in (await client.show("byte-model")).capabilities
        assert (await client.pull("byte-model")).status == "success"
        assert [part.status async for part in await client.pull("byte-model", stream=True)] == ["success"]
        with pytest.raises(client_of.ResponseError, match="missing") as failure:
            await client.chat(model="missing", messages=HI)
        assert failure.value.status_code == 404
        for refused in (
            client.copy("a", "b"),
            client.delete("a"),
            client.create(model="a", from_="b"),
            client.push("a"),
        ):
            with pytest.raises(client_of.ResponseError):
                await refused
        server.engine.renderer.output_formats = OutputFormats.choose((), tool="hermes", reasoning="think")
        server.fake.reply_to = lambda request, index: CALL
        parts = [part async for part in await client.chat("byte-model", HI, tools=[WEATHER], stream=True)]
        (call,) = (call for part in parts for call in part.message.tool_calls or ())
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Zürich"})

    async def main():
        async with served(max_model_len=2048) as server, on_a_socket(server) as url:
            await calls(client_of.AsyncClient(host=url), server)

    run(main())
