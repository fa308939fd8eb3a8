"""What a server refuses for want of room or time, over HTTP: the queue, the clocks, bodies, connections, tenants."""

import asyncio
import dataclasses
import json
import logging
from types import SimpleNamespace

import pytest
import uvicorn

from quire.interfaces.gateway.access.tenants import NOBODY
from quire.interfaces.gateway.files import upload
from quire.interfaces.server.life.process import loop_factory
from quire.interfaces.server.openai import prompt_pieces
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.transport.connections import connections_of
from quire.interfaces.server.transport.slow_readers import SlowReaders
from quire.interfaces.server.transport.unfinished import Unfinished

CHAT = "/v1/chat/completions"
ONE, TWO = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}


async def until(condition):
    """Lets everything else run until it holds; the test as a whole has a limit of time."""
    while not condition():
        await asyncio.sleep(0)


def held(server, num_tokens=0):
    """The engine computes so many tokens and stops; nothing begins with 0."""
    server.fake.hold(num_tokens)


# ---------------------------------------------------------------------------------------------- the queue


def test_the_queue_is_bounded_to_the_request(run, served):
    async def main():
        async with served(max_num_queued_requests=3) as server:
            gate = asyncio.Event()
            begin = server.engine.open_all

            async def late(prepared, observer):
                await gate.wait()
                return await begin(prepared, observer)

            server.engine.open_all = late
            accepted = [asyncio.ensure_future(server.chat()), asyncio.ensure_future(server.complete(n=2))]
            await until(lambda: server.services.room.num_requests == 3)
            for refused in (await server.chat(), await server.complete(stream=True), await server.complete(["a", "b"])):
                assert refused.status_code == 429
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
                assert int(refused.headers["retry-after"]) >= 1
            metrics = (await server.http.get("/metrics")).text
            assert 'quire:rejected_total{model_name="byte-model",why="queued_requests"} 3.0' in metrics
            assert 'quire:queued_requests{model_name="byte-model"} 3.0' in metrics
            gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*accepted)] == [200, 200]
            assert server.services.room.num_requests == 0
            assert (await server.chat()).status_code == 200

    run(main())


def test_a_full_queue_refuses_before_anything_is_rendered(run, served):
    async def main():
        async with served(max_num_queued_requests=1) as server:
            reservation = server.services.room.admit(NOBODY, [(1, 1)])
            server.engine.renderer.render_prompt = None
            for answer in (await server.chat("a" * 400), await server.complete("a"), await server.complete([1, 2])):
                assert answer.status_code == 429
            reservation.close()
            assert server.requests() == []

    run(main())


@pytest.mark.parametrize("options", [{"max_num_queued_requests": 3}, {"api_keys": ["a"], "tenant_max_requests": 3}])
def test_more_answers_than_may_ever_wait_are_a_mistake_in_n(run, served, options):
    async def main():
        async with served(**options) as server:
            server.http.headers["authorization"] = "Bearer a"
            beams = {"use_beam_search": True, "temperature": 0}
            for answer, name in (
                (await server.chat(n=4), "n"),
                (await server.chat(n=4, stream=True), "n"),
                (await server.complete(n=4), "n"),
                (await server.complete(n=4, **beams), "n"),
                (await server.complete(["a", "b"], n=2), "prompt"),
                (await server.complete(["a"] * 4), "prompt"),
            ):
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error["param"] == name
                assert error["message"].startswith(f"{name}: ")
            assert (await server.chat(n=3)).status_code == 200

    run(main())


def test_prompt_tokens_are_bounded(run, served):
    async def main():
        async with served(max_num_queued_tokens=50) as server:
            assert (await server.complete([1] * 50)).status_code == 200
            impossible = await server.complete([1] * 51)
            assert impossible.status_code == 400
            assert "max_num_queued_tokens=50" in impossible.json()["error"]["message"]
            text = "a" * 60
            for answer, name in (
                (await server.complete(text), "prompt"),
                (await server.chat(text), "messages"),
                (await server.post("/v1/responses", {"input": text, "store": False}), "input"),
                (await server.post("/v1/embeddings", {"input": text}), "input"),
                # before anything is rendered
                (await server.post("/v1/embeddings", {"input": [1] * 51}), "input"),
            ):
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, name)
                assert error["message"].startswith(f"{name}: ")
            assert server.services.room.num_tokens == 0

    run(main())


def test_by_default_four_times_the_cache_may_wait(run, served):
    async def main():
        async with served() as server:
            ready = server.engine.ready
            assert server.services.room.max_tokens == 4 * ready.num_blocks * ready.block_size
            assert server.services.room.max_requests == 1024

    run(main())


def test_who_leaves_gives_its_place_back(run, served):
    async def main():
        async with served(max_num_queued_requests=2) as server:
            held(server, 1)
            for _ in range(5):
                task = asyncio.ensure_future(server.chat(stream=True))
                await until(lambda: server.fake.running)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await until(lambda: not server.fake.running)
            assert server.services.room.num_requests == 0
            assert server.services.room.report()[0].num_requests == 0

    run(main())


# ---------------------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_waits_too_long_hears_when_to_come_again(run, served, stream):
    async def main():
        async with served(max_queue_seconds=0.05) as server:

            async def never(prepared, observer):
                await asyncio.Event().wait()

            server.engine.open_all = never
            answer = await server.chat(stream=stream)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "service_unavailable"
            assert int(answer.headers["retry-after"]) >= 1
            assert server.state.metrics.rejected.value("queue_time") == 1
            assert (server.services.room.num_requests, len(server.state.in_flight)) == (0, 0)

    run(main())


def test_whoever_takes_too_long_is_ended(run, served, events_of):
    async def main():
        async with served(max_request_seconds=0.1, max_queue_seconds=0.05) as server:
            held(server, 2)
            whole = await server.chat()
            assert (whole.status_code, whole.json()["error"]["code"]) == (504, "request_timeout")
            assert whole.headers["x-should-retry"] == "false"
            *chunks, last = events_of((await server.chat(stream=True)).text)
            assert chunks
            assert last["error"]["code"] == "request_timeout"
            await until(lambda: not server.fake.running)
            assert len(server.fake.aborted) == 2
            counted = 'quire:requests_aborted_total{kind="request_time",model_name="byte-model"} 2.0'
            assert counted in (await server.http.get("/metrics")).text

    run(main())


def test_the_administrator_ends_a_request(run, served):
    async def main():
        async with served(admin_api_key="root") as server:
            held(server, 1)
            asked = asyncio.ensure_future(server.post(CHAT, {"messages": []} | BODY, **{"x-request-id": "long-one"}))
            other = asyncio.ensure_future(server.chat())
            await until(lambda: len(server.fake.running) == 2)
            answer = await server.post("/v1/admin/requests/long-one/abort", {}, authorization="Bearer root")
            assert answer.json() == {"object": "request.aborted", "request_id": "long-one", "num_aborted": 1}
            assert (await asked).json()["error"]["code"] == "request_aborted"
            server.fake.release()
            assert (await other).status_code == 200

    run(main())


# ---------------------------------------------------------------------------------------------- bodies


BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"messages": [{"role": "user", "content": "a"}] * 4097}, 400),
        ({"stop": ["a"] * 17}, 400),
        ({"tools": [{"type": "function", "function": {"name": f"f{number}"}} for number in range(129)]}, 400),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, 400),
        ({"bad_words": ["a"] * 129}, 400),
        ({"n": 129}, 400),
        ({"top_logprobs": 21, "logprobs": True}, 400),
    ],
)
def test_how_much_a_request_may_hold(run, served, fields, status):
    async def main():
        async with served() as server:
            answer = await server.post(CHAT, {**BODY, **fields})
            assert answer.status_code == status
            assert answer.json()["error"]["param"] == next(iter(fields))

    run(main())


@pytest.mark.parametrize(("depth", "is_too_deep"), [(62, False), (63, True), (10**5, True)])
def test_how_deep_a_body_may_be(run, served, depth, is_too_deep):
    async def main():
        async with served() as server:
            content = b'{"prompt": "a", "metadata": %b}' % (b"[" * depth + b"[]" + b"]" * depth)
            answer = await server.http.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert answer.status_code == (400 if is_too_deep else 200), answer.text
            # many brackets are not deep ones
            flat = {"prompt": "a", "metadata": [[{}]] * 1000}
            assert (await server.post("/v1/completions", flat)).status_code == 200

    run(main())


# ---------------------------------------------------------------------------------------------- connections


async def on_connections(server, seconds, main, protocol=None):
    http = protocol or connections_of(seconds, Unfinished(), SlowReaders())
    config = uvicorn.Config(server.app, port=0, http=http, lifespan="off", log_config=None, log_level=logging.CRITICAL)
    served = uvicorn.Server(config)
    task = asyncio.create_task(served.serve())
    try:
        await until(lambda: served.started or task.done())
        port = served.servers[0].sockets[0].getsockname()[1]
        await main(port)
    finally:
        served.should_exit = True
        await task


REQUEST = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET /hea", REQUEST + b"G", REQUEST[:-2]])
def test_a_head_that_does_not_come_whole_ends_the_connection(run, served, sent):
    async def main():
        async with served() as server:

            async def talk(port):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                answer = await reader.read()  # to the end, which the server makes
                assert answer.startswith(b"HTTP/1.1 200") if sent.startswith(REQUEST) else answer == b""
                writer.close()

            await on_connections(server, 0.1, talk)

    run(main())


def test_a_client_in_time_is_left_alone(run, served):
    async def main():
        async with served() as server:

            async def talk(port):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                for _ in range(2):
                    for part in (REQUEST[:10], REQUEST[10:]):
                        writer.write(part)
                        await writer.drain()
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                    await reader.readexactly(len(b'{"status":"ready"}'))
                writer.close()

            await on_connections(server, 20, talk)

    run(main())


class HandClock:
    """A loop whose time stands still until a test says so."""

    def __init__(self, loop):
        self.loop, self.due = loop, []

    def call_later(self, delay, callback, *args):
        if callback.__name__ != "_look":
            return self.loop.call_later(delay, callback, *args)
        handle = SimpleNamespace(run=lambda: callback(*args), cancel=lambda: self.due.remove(handle))
        self.due.append(handle)
        return handle

    def go_on(self):
        self.due.pop().run()

    def __getattr__(self, name):
        return getattr(self.loop, name)


# more than the system takes for a client that does not read
SIZE = 16 * 2**20


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, loop_factory()])
@pytest.mark.parametrize("kind", ["whole", "in pieces", "stream"])
def test_a_client_that_takes_nothing_of_its_answer_is_given_up(caplog, make_loop, kind):
    caplog.set_level("INFO", "quire.server.access")

    async def app(scope, receive, send):
        headers = [] if kind == "stream" else [(b"content-length", b"%d" % SIZE)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        num_pieces = 1 if kind == "whole" else 16
        for number in range(num_pieces):
            more = number < num_pieces - 1
            await send({"type": "http.response.body", "body": bytes(SIZE // num_pieces), "more_body": more})

    async def main():
        clocks = []
        protocol = connections_of(20, Unfinished(), SlowReaders())

        class Watched(protocol):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                self.loop = HandClock(self.loop)
                clocks.append((self, self.loop))

        async def talk(port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(REQUEST)
            await until(lambda: clocks and clocks[0][0].transport.get_write_buffer_size())
            [(connection, clock)] = clocks
            for _ in range(3):
                clock.go_on()
            if kind == "stream":
                # whoever sends it has its own clock
                for _ in range(10):
                    clock.go_on()
                assert not connection.transport.is_closing()
                writer.transport.abort()
                return
            # it takes something after all, which starts the clock anew
            unsent = connection.transport.get_write_buffer_size()
            num_read = 0
            # in pieces it may have grown when this looks: the next one is written at once
            while connection.transport.get_write_buffer_size() == unsent:
                num_read += len(await reader.read(2**16))
            # in pieces: what comes next takes its place
            await until(connection.transport.get_write_buffer_size)
            num_looks = 0
            while not connection.transport.is_closing() and num_looks < 10:
                clock.go_on()
                num_looks += 1
            # the first one may have seen what it took
            assert num_looks in (4, 5)
            rest = await reader.read()
            assert num_read + len(rest) < SIZE
            writer.close()

        await on_connections(SimpleNamespace(app=app), 20, talk, Watched)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(main(), 30))
    lines = [one.getMessage() for one in caplog.records if "takes nothing" in one.getMessage()]
    assert len(lines) == (kind != "stream")
    assert all(line.endswith("takes nothing of its answer for 60 s and is given up") for line in lines)


def test_a_body_that_stands_still(run, served):
    async def main():
        async with served(first_byte_seconds=0.05) as server:

            async def body():
                yield b'{"prompt": '
                await asyncio.sleep(10)
                yield b'"a"}'

            answer = await server.http.post(
                "/v1/completions", content=body(), headers={"content-type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "idle_timeout")

    run(main())


def test_the_option_says_what_may_stand_still_longer():
    text = next(one.metadata["help"] for one in dataclasses.fields(ServerOptions) if one.name == "first_byte_seconds")
    for seconds in (prompt_pieces.IDLE_SECONDS, upload.IDLE_SECONDS):
        assert f"uploads and prompts in pieces have {seconds:g} seconds" in text


def test_an_upload_that_stands_still(run, served, monkeypatch, tmp_path):
    async def body():
        yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nba'
        await asyncio.sleep(10)

    async def main():
        async with served(files_folder=str(tmp_path)) as server:
            monkeypatch.setattr(upload, "IDLE_SECONDS", 0.05)
            headers = {"content-type": "multipart/form-data; boundary=x"}
            answer = await server.http.post("/v1/files", content=body(), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "idle_timeout")

    run(main())


def test_a_body_that_comes_in_crumbs_ends(run, served):
    async def crumbs():
        while True:
            yield b" "
            await asyncio.sleep(0.001)

    async def main():
        async with served(max_request_seconds=0.1) as server:
            headers = {"content-type": "application/json"}
            answer = await server.http.post(CHAT, content=crumbs(), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "idle_timeout")
            assert "max_request_seconds" in answer.json()["error"]["message"]

    run(main())


# ---------------------------------------------------------------------------------------------- tenants


def test_each_tenant_has_a_part_of_the_cache_and_its_weight(run, served, tmp_path):
    async def main():
        path = tmp_path / "keys"
        path.write_text("a: one weight=3\nb: two\n")
        path.chmod(0o600)
        async with served(api_key_file=str(path)) as server:
            for headers in (ONE, TWO, ONE):
                assert (await server.post(CHAT, BODY, **headers)).status_code == 200
            first, second, third = [request.tenant for request in server.requests()]
            assert first == third != second
            assert (first.name, first.weight, second.name) == ("a", 3, "b")
            assert len({first.cache_scope, second.cache_scope, ""}) == 3
        async with served(api_keys=["one"]) as server:
            await server.post(CHAT, BODY, **ONE)
            assert server.requests()[0].tenant is None, "one alone is served as if there were no tenants"

    run(main())


def test_one_tenant_does_not_push_before_another(run, served):
    async def main():
        async with served(api_keys=["one", "two"]) as server:
            refused = await server.post(CHAT, {**BODY, "priority": -1}, **ONE)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
            assert (await server.post(CHAT, {**BODY, "priority": 5}, **ONE)).status_code == 200
        async with served(api_keys=["one"]) as server:
            assert (await server.post(CHAT, {**BODY, "priority": -1}, **ONE)).status_code == 200

    run(main())


def test_quotas_are_the_tenants(run, served):
    async def main():
        async with served(api_keys=["one", "two"], tenant_max_requests=1) as server:
            held(server, 1)
            first = asyncio.ensure_future(server.post(CHAT, BODY, **ONE))
            await until(lambda: server.fake.running)
            assert (await server.post(CHAT, BODY, **ONE)).status_code == 429
            other = asyncio.ensure_future(server.post(CHAT, BODY, **TWO))
            await until(lambda: len(server.fake.running) == 2)
            server.fake.release()
            assert [(await one).status_code for one in (first, other)] == [200, 200]
            assert (await server.post(CHAT, BODY, **ONE)).status_code == 200

    run(main())


HOSTS = ["quire.test", "x/v1/models?", "a#", "//", "localhost/health"]
PATHS = ["/v1/../v1/models", "//v1/models", "/V1/models", "/v1%2fmodels", "/health/../v1/models", "/health/"]
GIVEN = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer one "},
    {"authorization": "bearer"},
    {"authorization": "Bearer " + "k" * 10**4},
    {"authorization": b"Bearer \xc3\xa9"},
    {"x-api-key": ""},
    {"authorization": "Bearer one", "x-api-key": "two"},
]


@pytest.mark.parametrize("host", HOSTS)
def test_nothing_but_what_is_public_is_answered_without_a_key(run, served, host):
    """SEC-11: every route of the application, every method, whatever the host says it is."""

    async def main():
        async with served(api_keys=["one"], admin_api_key="root") as server:
            public = {"/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/version"}
            paths = [getattr(route, "path", "") for route in server.app.routes]
            assert len(paths) > 40
            for path in [*paths, *PATHS]:
                if path in public or path == "/" or path.startswith("/page"):
                    continue
                for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
                    answer = await server.http.request(method, path, headers={"host": host})
                    assert answer.status_code == 401, (method, path, answer.text)
            for given in GIVEN:
                assert (await server.http.get("/v1/models", headers={"host": host, **given})).status_code == 401, given

    run(main())


def test_a_refusal_says_nothing_about_the_key(run, served):
    async def main():
        async with served(api_keys=["one"]) as server:
            answer = await server.http.get("/v1/models", headers={"authorization": "Bearer sk-mine"})
            assert "sk-mine" not in json.dumps([answer.text, *answer.headers.items()])

    run(main())
