"""Streams: what stands on the wire, event by event, and that a client which goes away frees its request."""

import asyncio
import gc
import json
import logging

import httpx2 as httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

HEALTH = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


def chat_request(*, is_stream: bool) -> bytes:
    """As it stands on the wire."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": is_stream}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


@pytest.fixture
def stream_chat(events_of):
    async def send(server, content="Hi", **fields):
        response = await server.chat(content, stream=True, **fields)
        assert response.status_code == 200, response.text
        return events_of(response.text)

    return send


@pytest.fixture
def stream_completion(events_of):
    async def send(server, prompt="Hi", **fields):
        response = await server.complete(prompt, stream=True, **fields)
        assert response.status_code == 200, response.text
        return events_of(response.text)

    return send


def chat_texts(events: list[dict], n: int = 1) -> list[str]:
    texts = [""] * n
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    return texts


def test_headers(run, served):
    async def main():
        async with served() as server:
            response = await server.chat(stream=True)
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            assert "content-length" not in response.headers
            assert response.headers["x-request-id"]

    run(main())


def test_a_chat(run, served, stream_chat):
    async def main():
        async with served() as server:
            events = await stream_chat(server)
            assert {(e["id"], e["created"], e["model"], e["object"]) for e in events} == {
                (events[0]["id"], events[0]["created"], "byte-model", "chat.completion.chunk")
            }
            assert events[0]["id"].startswith("chatcmpl-")
            assert all("usage" not in event for event in events)
            choices = [event["choices"][0] for event in events]
            assert choices[0] == {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            assert choices[-1] == {
                "index": 0,
                "delta": {},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
            assert all(choice["finish_reason"] is None and "role" not in choice["delta"] for choice in choices[1:-1])
            assert chat_texts(events) == server.texts(1, 5)

    run(main())


def test_usage_is_the_last_event_and_null_before(run, served, stream_chat, stream_completion):
    async def main():
        async with served() as server:
            options = {"include_usage": True, "include_obfuscation": False}
            for stream, whole in ((stream_chat, server.chat), (stream_completion, server.complete)):
                *events, last = await stream(server, n=2, max_tokens=3, stream_options=options)
                assert all(event["usage"] is None for event in events)
                assert last["choices"] == []
                assert last["id"] == events[0]["id"]
                assert last["usage"] == (await whole(n=2, max_tokens=3)).json()["usage"]
                assert last["usage"]["completion_tokens"] == 6

    run(main())


def test_choices_interleave_and_equal_the_whole_answer(run, served, stream_chat):
    async def main():
        async with served() as server:
            events = await stream_chat(server, n=3, stop="to")
            order = [event["choices"][0]["index"] for event in events]
            assert order != sorted(order)
            for index in range(3):
                mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
                assert ["role" in choice["delta"] for choice in mine] == [True] + [False] * (len(mine) - 1)
                assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
            whole = (await server.chat(n=3, stop="to")).json()
            assert chat_texts(events, 3) == [choice["message"]["content"] for choice in whole["choices"]]

    run(main())


def test_no_event_holds_half_a_character(run, served, stream_chat):
    async def main():
        async with served() as server:
            server.fake.reply_to = lambda request, index: "1\u00e9\u4e2d\U0001f468\u200d\U0001f469\nline\r\n\u2028end"
            events = await stream_chat(server)
            assert chat_texts(events) == [server.fake.reply_to(None, 0)]
            assert "\ufffd" not in json.dumps(events, ensure_ascii=False)

    run(main())


def test_logprobs_of_a_stream_equal_those_of_the_whole(run, served, stream_chat, stream_completion):
    async def main():
        async with served() as server:
            fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 30}
            events = await stream_chat(server, **fields)
            found = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
            whole = (await server.chat(**fields)).json()["choices"][0]["logprobs"]
            assert [entry for part in found for entry in part["content"]] == whole["content"]

            fields = {"logprobs": 2, "max_tokens": 30, "echo": True}
            events = await stream_completion(server, "üb", **fields)
            whole = (await server.complete("üb", **fields)).json()["choices"][0]["logprobs"]
            for column, values in whole.items():
                parts = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
                assert [value for part in parts for value in part[column]] == values

    run(main())


def test_a_completion_of_several_prompts(run, served, stream_completion):
    async def main():
        async with served() as server:
            fields = {"n": 2, "echo": True, "max_tokens": 30}
            events = await stream_completion(server, ["a", "bc"], **fields)
            texts = [""] * 4
            for event in events:
                (choice,) = event["choices"]
                texts[choice["index"]] += choice["text"]
            whole = (await server.complete(["a", "bc"], **fields)).json()
            assert texts == [choice["text"] for choice in whole["choices"]]
            assert texts == [f"{p}Answer {i} to {len(p)} tokens: grüße " for p in ("a", "bc") for i in (0, 1)]
            ends = [e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]]
            assert sorted(ends) == [0, 1, 2, 3]
            assert {e["object"] for e in events} == {"text_completion"}

    run(main())


def test_a_mistake_has_its_real_status(run, served):
    async def main():
        async with served() as server:
            response = await server.chat(stream=True, temperature=-1)
            assert response.status_code == 400
            assert response.headers["content-type"] == "application/json"
            server.fake.failures[0] = "at once"
            assert (await server.chat(stream=True)).status_code == 500

    run(main())


def test_a_failure_after_the_first_byte_is_an_event(run, served, events_of):
    async def main():
        async with served() as server:
            server.fake.failures[4] = "secret"
            response = await server.chat(stream=True)
            assert response.status_code == 200
            *events, last = events_of(response.text)
            assert chat_texts(events) == ["Answ"]
            assert last["error"]["code"] == "internal_error"
            assert "secret" not in response.text
            assert len(server.state.in_flight) == 0

    run(main())


async def wait_for(server, condition) -> None:
    """Until the fake engine's state is as wanted; without a fixed time."""
    while not condition():
        server.fake.changed.clear()
        if not condition():
            await server.fake.changed.wait()


LEAVING = {
    "a stream": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
    "a whole answer": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "two prompts": ("/v1/completions", {"prompt": ["x", "y"]}),
    "two streamed prompts": ("/v1/completions", {"prompt": ["x", "y"], "stream": True}),
    "two answers": ("/v1/completions", {"prompt": "x", "n": 2}),
}


@pytest.mark.parametrize("hold_after", [0, 3])
@pytest.mark.parametrize("case", LEAVING)
def test_a_client_that_leaves_frees_its_requests(run, served, on_a_socket, caplog, case, hold_after):
    path, body = LEAVING[case]
    num_requests = 2 if "prompts" in case else 1

    async def main():
        async with served() as server, on_a_socket(server) as url:
            server.fake.hold(hold_after)
            _, _, host_port = url.partition("://")
            host, _, port = host_port.partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            data = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
            writer.write(head.encode() + b"\r\n\r\n" + data)
            await wait_for(server, lambda: len(server.fake.running) == num_requests)
            if body.get("stream") and hold_after:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.transport.abort()
            await wait_for(server, lambda: len(server.fake.aborted) == num_requests)
            assert not server.fake.running
            while len(server.state.in_flight):
                await asyncio.sleep(0)
            assert server.state.metrics.request_success.value("abort") == num_requests
            while not server.state.metrics.http_responses.value(path, "499"):
                await asyncio.sleep(0)
            assert "Traceback" not in caplog.text
            # and another client is served
            server.fake.release()
            async with httpx.AsyncClient() as other:
                assert (await other.post(url + path, json={**body, "stream": False})).status_code == 200

    run(main())


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_with_others_waiting_frees_the_first(run, served, on_a_socket, is_stream, is_reset):
    async def main():
        async with served() as server, on_a_socket(server) as url:
            server.fake.hold(3)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            # one in the same packet, and more when it runs
            writer.write(chat_request(is_stream=is_stream) + HEALTH)
            await wait_for(server, lambda: server.fake.running)
            if is_stream:
                await reader.readuntil(b"data: ")
            writer.write(HEALTH * 2)
            await writer.drain()
            writer.transport.abort() if is_reset else writer.close()
            await wait_for(server, lambda: server.fake.aborted)
            while len(server.state.in_flight):
                await asyncio.sleep(0)

    run(main())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_of_http_1_0_gets_a_body_that_ends_with_the_connection(run, served, on_a_socket, events_of, is_stream):
    async def main():
        async with served() as server, on_a_socket(server) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(chat_request(is_stream=is_stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert b"\r\nconnection: close" in head
            assert b"transfer-encoding" not in head
            assert (b"content-length" in head) != is_stream
            if is_stream:
                text = "".join(event["choices"][0]["delta"].get("content", "") for event in events_of(body.decode()))
            else:
                text = json.loads(body)["choices"][0]["message"]["content"]
            assert [text] == server.texts(1, len(server.requests()[0].prompt_token_ids))
            writer.close()

    run(main())


def test_requests_in_a_row_are_answered_in_their_order(run, served, on_a_socket):
    """More of them than are read before the first is answered."""

    async def main():
        async with served() as server, on_a_socket(server) as url:
            server.fake.hold(3)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(chat_request(is_stream=False))
            await wait_for(server, lambda: server.fake.running)
            for number in range(40):
                writer.write(HEALTH[:-2] + b"x-request-id: %d\r\n\r\n" % number)
                await writer.drain()
                await asyncio.sleep(0)
            server.fake.release()
            assert b'"finish_reason":"stop"' in await reader.readuntil(b"}}")
            for number in range(40):
                assert b"x-request-id: %d\r\n" % number in await reader.readuntil(b'{"status":"alive"}')
            writer.close()

    run(main())


def test_a_broken_body_behind_a_request_is_refused_in_its_turn(run, served, on_a_socket, caplog):
    caplog.set_level(logging.INFO, "quire.server.access")

    async def main():
        async with served() as server, on_a_socket(server) as url:
            server.fake.hold(3)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(chat_request(is_stream=False))
            await wait_for(server, lambda: server.fake.running)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(HEALTH + head + b"no number\r\n")
            while "unreadable request" not in caplog.text:
                await asyncio.sleep(0)
            server.fake.release()
            first, second, third = (await reader.read()).split(b"HTTP/1.1 ", 3)[1:]
            assert first.startswith(b"200 ")
            assert b'"finish_reason":"stop"' in first
            assert second.startswith(b"200 ")
            assert third.startswith(b"400 ")
            assert b"\r\nconnection: close" in third
            assert b"\r\nx-request-id: req_" in third
            writer.close()

    run(main())


def test_a_request_that_is_over_leaves_nothing_for_the_garbage_collector(run, served, on_a_socket):
    async def main():
        async with served() as server, on_a_socket(server) as url, httpx.AsyncClient() as client:
            body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
            gc.collect()
            gc.disable()
            try:
                for _ in range(5):
                    assert (await client.post(url + "/v1/chat/completions", json=body)).status_code == 200
                # the connection holds its last one
                assert sum(type(one) is RequestResponseCycle for one in gc.get_objects()) <= 1
            finally:
                gc.enable()

    run(main())


def test_tokens_are_sent_when_they_are_made(run, served, on_a_socket):
    async def main():
        async with served() as server, on_a_socket(server) as url:
            server.fake.hold(5)
            body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
            async with (
                httpx.AsyncClient() as client,
                client.stream("POST", url + "/v1/chat/completions", json=body) as response,
            ):
                text = ""
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
                    # the sixth token is not made before the first five have arrived here
                    if text == "Answe":
                        server.fake.release()
            assert text == server.texts(1, 4)[0]

    run(main())
