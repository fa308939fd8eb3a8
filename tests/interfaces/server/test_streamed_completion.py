"""Prompts in pieces over HTTP: lines of a body, on the application itself. Sockets: test_prompt_sockets.py."""

import asyncio
import json

import pytest

from quire.interfaces.server.openai import prompt_pieces, streamed_completion

TYPE = {"content-type": "application/x-ndjson"}


async def send(server, *lines, content_type="application/x-ndjson", headers=()):
    async def body():
        for line in lines:
            yield (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            await asyncio.sleep(0)

    headers = {"content-type": content_type, **dict(headers)}
    return await server.http.post("/v1/completions", content=body(), headers=headers)


def stripped(body: dict) -> dict:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    "lines",
    [
        [{"text": "Hello"}, {"text": " wor"}, {"text": "ld"}],
        [{"text": "Hello world"}, {"is_final": True}],
        [{"text": ""}, {"text": "Hello world", "is_final": True}],
        [{"token_ids": [72]}, {"token_ids": []}, {"token_ids": list(b"ello world"), "is_final": True}],
    ],
)
@pytest.mark.parametrize("fields", [{}, {"n": 2, "echo": True, "max_tokens": 100}, {"logprobs": 1}, {"stop": "8"}])
def test_the_answer_is_that_of_the_whole_prompt(run, served, lines, fields):
    async def main():
        async with served() as server:
            prompt = "Hello world" if "text" in lines[0] else list(b"Hello world")
            whole = await server.complete(prompt, **fields)
            streamed = await send(server, fields, *lines)
            assert streamed.status_code == 200, streamed.text
            assert stripped(streamed.json()) == stripped(whole.json())

    run(main())


def test_a_streamed_answer(run, served, events_of):
    async def main():
        async with served() as server:
            fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 40}
            whole = events_of((await server.complete("Hello world", **fields)).text)
            streamed = events_of((await send(server, {**fields, "prompt": "Hello"}, {"text": " world"})).text)
            assert [stripped(event) for event in streamed] == [stripped(event) for event in whole]
            assert streamed[-1]["usage"]["prompt_tokens"] == 11

    run(main())


def test_lines_in_any_chunks(run, served):
    """Where a chunk ends says nothing: a line may come byte by byte, and the last needs no end."""

    async def main():
        async with served() as server:
            data = b'{"max_tokens": 100}\r\n\n  \n{"text": "gr\xc3\xbc"}\n{"text": "n"}'
            for size in (1, 7, 100):

                async def body(size=size):
                    for at in range(0, len(data), size):
                        yield data[at : at + size]

                response = await server.http.post("/v1/completions", content=body(), headers=TYPE)
                assert response.json()["choices"][0]["text"].startswith("Answer 0 to 5 tokens")

    run(main())


def test_computed_before_the_body_ends(run, served):
    async def main():
        async with served() as server:
            has_come = asyncio.Event()

            async def body():
                yield b'{"max_tokens": 5}\n{"text": "one two"}\n'
                while not server.requests():
                    await asyncio.sleep(0)
                assert server.requests()[0].prompt_token_ids == list(b"one")
                has_come.set()
                yield b'{"text": " three"}'

            # the transport of the test client reads a whole body first, so the application is called by itself
            receive = _messages(body())
            sent = []

            async def take(message):
                sent.append(message)

            scope = {
                "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1",
                "headers": [(b"host", b"x"), (b"content-type", b"application/x-ndjson")],
                "scheme": "http", "root_path": "",
            }  # fmt: skip
            await server.app(scope, receive, take)
            assert has_come.is_set()
            assert sent[0]["status"] == 200

    run(main())


def _messages(body):
    async def receive():
        try:
            return {"type": "http.request", "body": await anext(body), "more_body": True}
        except StopAsyncIteration:
            if not ended:
                ended.append(True)
                return {"type": "http.request", "body": b"", "more_body": False}
            await asyncio.Event().wait()

    ended = []
    return receive


@pytest.mark.parametrize(
    ("lines", "param", "words"),
    [
        ([], None, "empty"),
        ([b"", b"  "], None, "empty"),
        ([b"{"], None, "The line is not valid JSON"),
        ([b"[]"], None, "The line must be a JSON object"),
        ([{}], "prompt", "no piece came. Send at least one"),
        ([{}, {"text": ""}], "prompt", "no tokens"),
        ([{"max_token": 5}, {"text": "a"}], "max_token", "Unknown field"),
        ([{"temperature": "hot"}, {"text": "a"}], "temperature", "must be a number"),
        ([{"temperature": -1}, {"text": "a"}], "temperature", "temperature"),
        ([{"suffix": "x"}, {"text": "a"}], "suffix", "not supported"),
        ([{"model": "other"}, {"text": "a"}], "model", "does not exist"),
        ([{"prompt": ["a", "b"]}, {"text": "a"}], "prompt", "first of them"),
        ([{"stream_options": {}}, {"text": "a"}], "stream_options", "only with stream"),
        ([{}, {"tex": "a"}], "tex", "Unknown field 'tex'"),
        ([{}, {"content": "a"}], "content", "Unknown field"),
        ([{}, {"text": 1}], "text", "must be a string"),
        ([{}, {}], "text", "A piece has"),
        ([{}, {"text": "a", "token_ids": [1]}], "token_ids", "has one of them"),
        ([{}, {"text": "a"}, {"token_ids": [1]}], "prompt", "Give one kind"),
        ([{}, {"token_ids": [1, 99999]}], "prompt", "99999"),
        ([{}, {"token_ids": [-1]}], "prompt", "-1"),
        ([{}, b'{"text": "\\ud83d"}'], None, "surrogate"),
        ([{}, b'{"text": "\xff"}'], None, "The line is not valid UTF-8"),
        ([{}, {"text": "a", "is_final": True}, {"text": "b"}], "is_final", "no line may follow"),
        ([{"max_tokens": 510}, {"text": "Hello"}], "max_tokens", "maximum context length"),
        ([{}, *[{"text": "word " * 100}] * 3], "prompt", "maximum context length"),
        ([{"n": 500}, {"text": "a"}], "n", "n="),
    ],
)
def test_mistakes(run, served, lines, param, words):
    async def main():
        async with served() as server:
            response = await send(server, *lines)
            assert response.status_code in (400, 404), response.text
            error = response.json()["error"]
            assert words.lower() in error["message"].lower()
            assert error["param"] == param
            while server.engine.fake.running:
                await asyncio.sleep(0)
            assert server.engine.num_open_requests == 0
            assert len(server.state.in_flight) == 0
            assert (await server.complete()).status_code == 200

    run(main())


def test_sizes(run, served, monkeypatch):
    monkeypatch.setattr(prompt_pieces, "MAX_PIECE_BYTES", 100)

    async def main():
        async with served(max_body_bytes=1000) as server:
            response = await send(server, {}, {"text": "a" * 200})
            assert (response.status_code, "A piece is larger" in response.text) == (413, True)
            response = await send(server, {}, b'{"text": "' + b"a" * 300)
            assert response.status_code == 413
            response = await send(server, {}, *[{"text": ""}] * 200)
            assert (response.status_code, "together" in response.text) == (413, True)

    run(main())


def test_a_client_that_falls_silent(run, served, monkeypatch):
    monkeypatch.setattr(prompt_pieces, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(streamed_completion, "_DISCARD_SECONDS", 0.0)

    async def main():
        async with served() as server:
            response = await send(server, {}, {"text": "one two"})
            assert response.status_code == 408
            assert response.json()["error"]["code"] == "idle_timeout"
            assert server.engine.num_open_requests == 0

    run(main())


def test_what_is_no_list_of_lines(run, served):
    async def main():
        async with served() as server:
            for content_type in ("text/plain", "application/x-ndjson; charset=latin-1", "application/x-ndjsonx"):
                assert (await send(server, {}, {"text": "a"}, content_type=content_type)).status_code == 415
            response = await send(server, {}, {"text": "a"}, headers={"content-encoding": "gzip"})
            assert response.status_code == 415
            assert (await send(server, {}, {"text": "a"}, content_type="application/ndjson")).status_code == 200

    run(main())


def test_strict_servers_know_no_other_fields(run, served):
    async def main():
        async with served(strict=True) as server:
            response = await send(server, {"something": 1}, {"text": "a"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "something")

    run(main())
