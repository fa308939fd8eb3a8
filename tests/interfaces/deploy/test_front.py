"""The front of several servers: where requests go, and what clients see of a copy that is lost."""

import asyncio
import json
import socket

import httpx2 as httpx
import msgspec
import pytest

from quire.interfaces.deploy.front import Front, Head, NotReachedError, Request, fields_of
from quire.interfaces.deploy.http_copy import HttpCopy
from quire.interfaces.deploy.served_copy import ServedCopy

JSON = Head(200, [("content-type", "application/json")])
STREAM = Head(200, [("content-type", "text/event-stream; charset=utf-8")])


class FakeCopy:
    """Says `parts`, and is lost before the one that is None."""

    def __init__(self, *parts):
        self.parts = parts
        self.asked = []
        self.is_up = True

    async def is_ready(self):
        if not self.is_up:
            raise ConnectionError
        return True

    async def answer(self, request):
        self.asked.append(request.body)
        for part in self.parts:
            if part is None:
                raise ConnectionError
            yield part


def front_of(*copies, **options):
    by_name = {str(number): copy for number, copy in enumerate(copies)}
    front = Front(by_name.__getitem__, **options)
    front.copies_are(by_name)
    return front


def chat(text, target="/v1/chat/completions"):
    return Request("POST", target, [], json.dumps({"messages": [{"role": "user", "content": text}]}).encode())


async def said(front, request):
    head, parts = await front.answer(request)
    return head.status, b"".join([part async for part in parts])


def run(test):
    asyncio.run(test)


def test_a_copy_that_is_lost_before_it_has_said_anything_costs_nothing():
    async def test():
        lost, other = FakeCopy(None), FakeCopy(JSON, b"{}")
        lost.is_up = False
        front = front_of(lost, other)
        assert [await said(front, chat(str(number))) for number in range(4)] == [(200, b"{}")] * 4
        assert front.num_serving == 1
        # it was not asked again
        assert len(lost.asked) == 1

    run(test())


def test_an_answer_that_nobody_reads_is_over_when_it_is_closed():
    async def test():
        front = front_of(FakeCopy(STREAM, b"a"), FakeCopy(STREAM, b"a"))
        for number in range(4):
            _, parts = await front.answer(chat(str(number)))
            await parts.aclose()
        assert [replica.num_sequences for replica in front._router.replicas()] == [0, 0]

    run(test())


def test_sounds_are_passed_on():
    """A form is no text of which a copy could hold the beginning."""

    async def test():
        copy = FakeCopy(JSON, b"{}")
        front = front_of(copy)
        form = b'--a\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\xff\x00\r\n--a--\r\n'
        for task in ("transcriptions", "translations"):
            headers = [("content-type", "multipart/form-data; boundary=a")]
            assert await said(front, Request("POST", f"/v1/audio/{task}", headers, form)) == (200, b"{}")
        assert copy.asked == [form, form]

    run(test())


def test_a_copy_that_still_loads_passes_its_requests_on():
    async def test():
        loading = FakeCopy(Head(503, []), b"not ready")
        loading.is_up = False
        front = front_of(loading, FakeCopy(JSON, b"{}"))
        assert await said(front, chat("a")) == (200, b"{}")
        assert front.num_serving == 1

    run(test())


def test_one_request_that_waited_too_long_is_no_loss_of_a_server():
    """A server that is ready says 503 to one of many: the others are not to be crowded into the last one."""

    async def test():
        copies = [FakeCopy(Head(503, []), b"waited too long") for _ in range(3)]
        front = front_of(*copies)
        assert await said(front, chat("a")) == (503, b"waited too long")
        assert front.num_serving == 3
        assert sum(len(copy.asked) for copy in copies) == 1

    run(test())


def test_a_request_that_ends_servers_does_not_go_through_all_of_them():
    async def test():
        copies = [FakeCopy(None) for _ in range(5)]
        front = front_of(*copies)
        status, text = await said(front, chat("a"))
        assert (status, json.loads(text)["error"]["code"]) == (500, "engine_restarted")
        assert sum(len(copy.asked) for copy in copies) == 2
        assert front.num_serving == 3

    run(test())


def test_servers_that_were_not_reached_are_not_counted():
    class Unreached(FakeCopy):
        async def answer(self, request):
            raise NotReachedError
            yield

    async def test():
        front = front_of(*(Unreached() for _ in range(4)), FakeCopy(JSON, b"{}"), policy="round_robin")
        assert await said(front, chat("a")) == (200, b"{}")
        assert front.num_serving == 1

    run(test())


def test_a_server_that_nobody_listens_for_is_not_reached():
    async def test():
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            copy = HttpCopy(f"http://127.0.0.1:{closed.getsockname()[1]}")
            with pytest.raises(NotReachedError):
                await anext(copy.answer(chat("a")))
            await copy.aclose()

    run(test())


@pytest.mark.parametrize(("num_bytes", "most_pieces"), [(1 << 20, 8192), (9 << 20, 0)])
def test_of_a_long_prompt_only_the_beginning_is_looked_at(num_bytes, most_pieces, monkeypatch):
    """All other clients wait while a prompt is cut into pieces."""
    seen = []

    async def test():
        front = front_of(FakeCopy(JSON, b"{}"))
        choose = front._router.choose

        def noted(pieces, *sizes):
            seen.append(pieces)
            return choose(pieces, *sizes)

        monkeypatch.setattr(front._router, "choose", noted)
        assert await said(front, chat("a" * num_bytes)) == (200, b"{}")
        assert await said(front, chat("a" * 1000)) == (200, b"{}")

    run(test())
    assert [len(pieces) for pieces in seen] == [most_pieces, 16]


def test_a_stream_that_is_cut_off_ends_with_one_error():
    async def test():
        front = front_of(FakeCopy(STREAM, b"data: 1\n\n", None))
        status, text = await said(front, chat("a"))
        assert status == 200
        first, error, end = text.split(b"\n\n")
        assert first == b"data: 1"
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_restarted"
        assert end == b""

    run(test())


def test_an_answer_that_is_cut_off_is_no_whole_one():
    async def test():
        front = front_of(FakeCopy(JSON, b"{", None))
        with pytest.raises(ConnectionError):
            await said(front, chat("a"))

    run(test())


def test_without_a_copy_there_is_one_error_until_one_is_back():
    async def test():
        copy = FakeCopy(None)
        copy.is_up = False
        looks = asyncio.Queue()
        front = front_of(copy, sleep=lambda seconds: looks.get())
        for _ in range(2):
            status, text = await said(front, chat("a"))
            assert status == 503
            assert "error" in json.loads(text)
        assert (await said(front, Request("GET", "/health/ready", [], b"")))[0] == 503
        await looks.put(None)
        copy.is_up = True
        copy.parts = (JSON, b"{}")
        await looks.put(None)
        while not front.num_serving:
            await asyncio.sleep(0)
        assert await said(front, chat("a")) == (200, b"{}")
        assert (await said(front, Request("GET", "/health/ready", [], b"")))[0] == 200

    run(test())


def test_copies_come_and_go():
    async def test():
        copies = {name: FakeCopy(STREAM, b"data: 1\n\n", b"data: 2\n\n") for name in "abc"}
        front = Front(copies.__getitem__)
        assert (await said(front, chat("a")))[0] == 503
        front.copies_are(["a"])
        _, begun = await front.answer(chat("a" * 1000))
        assert await anext(begun) == b"data: 1\n\n"
        # what a copy has begun it ends, though it is gone and another one has its place
        front.copies_are(["b", "c"])
        assert [part async for part in begun] == [b"data: 2\n\n"]
        for _ in range(6):
            assert (await said(front, chat("a" * 1000)))[0] == 200
        assert len(copies["a"].asked) == 1
        assert len(copies["b"].asked) + len(copies["c"].asked) == 6
        status, text = await said(front, Request("GET", "/health/ready", [], b""))
        assert (status, json.loads(text)) == (200, {"serving": 2, "of": 2})

    run(test())


def test_a_copy_that_was_lost_and_is_gone_does_not_come_back():
    async def test():
        lost, other = FakeCopy(None), FakeCopy(JSON, b"{}")
        looks = asyncio.Queue()
        copies = {"lost": lost, "other": other}
        front = Front(copies.__getitem__, sleep=lambda seconds: looks.get())
        front.copies_are(["lost"])
        assert (await said(front, chat("a")))[0] == 503
        front.copies_are(["other"])
        await looks.put(None)
        for _ in range(10):
            await asyncio.sleep(0)
        assert front.num_serving == 1
        assert (await said(front, chat("a"))) == (200, b"{}")
        assert len(lost.asked) == 1

    run(test())


def test_an_answer_of_a_copy_that_is_gone_says_nothing_of_its_successor():
    async def test():
        copies = {"old": FakeCopy(STREAM, b"data: 1\n\n", None), "new": FakeCopy(JSON, b"{}")}
        front = Front(copies.__getitem__)
        front.copies_are(["old"])
        _, begun = await front.answer(chat("a"))
        await anext(begun)
        front.copies_are(["new"])
        assert b"engine_restarted" in await anext(begun)
        # it has the number of the old one, and is not lost
        assert front.num_serving == 1

    run(test())


def test_who_has_answered_the_beginning_of_a_chat_gets_the_rest():
    async def test():
        copies = [FakeCopy(JSON, b"{}") for _ in range(3)]
        front = front_of(*copies)
        texts = {name: name * 700 for name in "abc"}
        for _ in range(5):
            for name in texts:
                await said(front, chat(texts[name]))
                texts[name] += f"{name} goes on. " * 20
        places = [{body.decode().split('"content": "')[1][0] for body in copy.asked} for copy in copies]
        assert sorted("".join(sorted(place)) for place in places) == ["a", "b", "c"]

    run(test())


def test_who_has_refused_a_chat_does_not_hold_it():
    """Tried again, it would come to the same one."""

    async def test():
        front = front_of(FakeCopy(Head(503, []), b"waited too long"), FakeCopy(JSON, b"{}"))
        assert [(await said(front, chat("a" * 1000)))[0] for _ in range(2)] == [503, 200]

    run(test())


def test_what_one_copy_would_keep_is_refused_by_name():
    async def test():
        copy = FakeCopy(JSON, b"{}")
        front = front_of(copy)
        for target in ("/v1/files", "/v1/sessions", "/v1/batches/x", "/v1/responses", "/admin"):
            status, text = await said(front, chat("a", target))
            assert status == 404
            assert target in json.loads(text)["error"]["message"]
        assert copy.asked == []
        assert (await said(front, Request("GET", "/v1/models/m?x=1", [], b"")))[0] == 200

    run(test())


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff{", b"[" * 100_000, b'{"prompt": "\\ud800"}'])
def test_any_body_is_passed_on(body):
    async def test():
        copy = FakeCopy(JSON, b"{}")
        assert (await said(front_of(copy), Request("POST", "/v1/completions", [], body)))[0] == 200
        assert copy.asked == [body]

    run(test())


def test_a_copy_is_a_whole_server():
    async def test():
        copy = ServedCopy({"model": "embedded", "num_threads": 1, "device": "cpu"}, {})
        try:
            await asyncio.wait_for(copy.wait_ready(), 120)
            body = json.dumps({"prompt": "One", "max_tokens": 3, "stream": True}).encode()
            headers = [("content-type", "application/json"), ("host", "elsewhere")]
            front = front_of(copy)
            status, text = await said(front, Request("POST", "/v1/completions", headers, body))
            assert status == 200
            assert text.endswith(b"data: [DONE]\n\n")
            copy.close()
            assert copy.has_ended
            assert (await said(front, Request("POST", "/v1/completions", headers, body)))[0] == 503
        finally:
            copy.close()

    run(test())


@pytest.mark.parametrize("target", ["/v1/models/../../metrics", "/v1/models/./a", "/v1/models/a/.."])
def test_no_path_leads_out_of_what_a_front_passes_on(target):
    async def test():
        copy = FakeCopy(JSON, b"{}")
        status, _ = await said(front_of(copy), Request("GET", target, [], b""))
        assert (status, copy.asked) == (404, [])

    run(test())


@pytest.mark.parametrize(
    ("target", "header", "status"),
    [
        ("/v1/models/a", "\xe9", 200),
        ("/v1/models/a%20b?c=%0D", "a", 200),
        ("/v1/models/a\r\nb", "a", 400),
        ("/v1/models/" + "a" * 70_000, "a", 400),
    ],
    ids=["Latin 1", "quoted", "a line's end", "long"],
)
def test_what_cannot_be_passed_on_is_no_loss_of_a_server(target, header, status):
    """One request would take all of them from everybody."""

    async def test():
        seen = []

        def answer(request):
            seen.append(request)
            return httpx.Response(200, stream=httpx.ByteStream(b"{}"))

        front = front_of(*(HttpCopy("http://server.test", httpx.MockTransport(answer)) for _ in range(2)))
        assert (await said(front, Request("GET", target, [("x-name", header)], b"")))[0] == status
        assert front.num_serving == 2
        assert [request.headers.raw[-1][1] for request in seen] == [header.encode("latin-1")] * (status == 200)

    run(test())


@pytest.mark.parametrize(("header", "status"), [("a \t", 200), ("a\x0bb", 400)], ids=["blanks at its end", "a control"])
def test_a_header_that_no_connection_takes_is_no_loss_of_a_server(header, status):
    """Blanks behind a value are legal."""

    async def test():
        seen = []

        async def serve(reader, writer):
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            copies = [HttpCopy(f"http://{host}:{port}") for _ in range(2)]
            front = front_of(*copies)
            request = Request("GET", "/v1/models", [("x-name", header)], b"")
            assert (await said(front, request))[0] == status
            assert front.num_serving == 2
            for copy in copies:
                await copy.aclose()
        assert [b"\r\nx-name: a\r\n" in head for head in seen] == [True] * (status == 200)

    run(test())


@pytest.mark.parametrize("body", [b"", b"[]", b'{"\xff": 1}', b'{"a": ' + b"[" * 100_000])
def test_what_is_no_json_object_has_no_fields(body):
    assert fields_of(body) is None
    assert fields_of(b'{"a": [1, 2]}') == {"a": msgspec.Raw(b"[1, 2]")}
