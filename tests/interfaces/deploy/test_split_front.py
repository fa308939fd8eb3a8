"""The front of servers that have a half of each request: what each is asked, and what is made of losses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.interfaces.cli import main
from quire.interfaces.deploy.front import Front, Head, Request
from quire.interfaces.deploy.split_front import SplitFront

JSON = Head(200, [("content-type", "application/json")])
PARAMS = {"do_remote_prefill": True, "handover": "of a prefill server"}
COMPUTED = (JSON, json.dumps({"choices": [], "kv_transfer_params": PARAMS}).encode())
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")


class FakeServer:
    """Says `parts`, and is lost before the one that is None."""

    def __init__(self, *parts: Head | bytes | None) -> None:
        self.parts = parts
        self.asked: list[dict[str, Any]] = []

    async def is_ready(self) -> bool:
        return None not in self.parts

    async def answer(self, request: Request) -> Any:
        self.asked.append(json.loads(request.body))
        for part in self.parts:
            if part is None:
                raise ConnectionError
            yield part


def front_of(kind: str, *servers: FakeServer) -> Front:
    by_name = {str(number): server for number, server in enumerate(servers)}
    front = Front(by_name.__getitem__, kind=kind)
    front.copies_are(by_name)
    return front


def asked(prefill: list[FakeServer], decode: list[FakeServer], body: Any, path: str = PATHS[0]) -> tuple[int, bytes]:
    async def ask() -> tuple[int, bytes]:
        front = SplitFront(front_of("prefill server", *prefill), front_of("decode server", *decode))
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head, parts = await front.answer(Request("POST", path, [("accept-encoding", "br")], data))
        return head.status, b"".join([part async for part in parts])

    return asyncio.run(ask())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("length", "least"),
    [({}, {"max_tokens": 1}), ({"max_tokens": 50}, {"max_tokens": 1}), ({"max_completion_tokens": 50},) * 2],
)
def test_each_is_asked_for_its_half(path: str, length: dict[str, int], least: dict[str, int]) -> None:
    prefill, decode = FakeServer(*COMPUTED), FakeServer(JSON, b"answer")
    body = {"prompt": "a", "n": 2, "stop": ["b"], **length}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 3}
    assert asked([prefill], [decode], streamed, path) == (200, b"answer")
    of_prompt = dict.fromkeys(least, 1)
    assert prefill.asked == [
        {**body, **of_prompt, "stream": False, "kv_transfer_params": {"do_remote_decode": True}},
    ]
    assert decode.asked == [{**streamed, "kv_transfer_params": PARAMS}]


@pytest.mark.parametrize(
    "lost",
    [
        (None,),
        (Head(503, []), b"it loads"),
        (Head(500, []), b"its engine was lost"),
        (JSON, b'{"choices":', None),
        (JSON, b"{"),
    ],
    ids=["gone", "loads", "fails", "cut off", "no answer"],
)
def test_without_a_prefill_server_nobody_fails(lost: tuple[Head | bytes | None, ...]) -> None:
    decode = FakeServer(JSON, b"answer")
    status, answer = asked([FakeServer(*lost)], [decode], {"prompt": "a"})
    assert (status, answer) == (200, b"answer")
    [body] = decode.asked
    assert body.get("kv_transfer_params") is None


def test_another_prefill_server_is_asked() -> None:
    lost, other = FakeServer(None), FakeServer(*COMPUTED)
    decode = FakeServer(JSON, b"answer")
    assert asked([lost, other], [decode], {"prompt": "a"})[0] == 200
    assert len(other.asked) == 1
    assert decode.asked[0]["kv_transfer_params"] == PARAMS


class HangingServer(FakeServer):
    """Stands still behind its parts, and is not there while it does."""

    async def is_ready(self) -> bool:
        await asyncio.Event().wait()
        return True

    async def answer(self, request: Request) -> Any:
        async for part in super().answer(request):
            yield part
        await asyncio.Event().wait()


@pytest.mark.parametrize("parts", [(), (JSON,), (JSON, b"{")], ids=["at once", "after its head", "in its answer"])
def test_a_prefill_server_that_hangs_holds_nobody(parts: tuple[Head | bytes, ...]) -> None:
    async def ask() -> None:
        hanging, other, decode = HangingServer(*parts), FakeServer(*COMPUTED), FakeServer(JSON, b"answer")
        front = Front({"0": hanging, "1": other}.__getitem__, "round_robin", kind="prefill server", part_seconds=0.02)
        front.copies_are(["0", "1"])
        split = SplitFront(front, front_of("decode server", decode))
        for _ in range(3):
            head, said = await split.answer(Request("POST", PATHS[0], [], b'{"prompt": "a"}'))
            assert head.status == 200
            assert b"".join([part async for part in said]) == b"answer"
        assert len(decode.asked) == 3
        # it was asked once, and then others were; what had begun is not asked for again
        assert len(hanging.asked) == 1
        assert [body.get("kv_transfer_params") for body in decode.asked] == [None if parts else PARAMS, PARAMS, PARAMS]

    asyncio.run(asyncio.wait_for(ask(), 10))


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
def test_what_a_prefill_server_refuses_is_refused(status: int) -> None:
    decode = FakeServer(JSON, b"answer")
    assert asked([FakeServer(Head(status, []), b"why")], [decode], {"prompt": "a"}) == (status, b"why")
    assert decode.asked == []


def test_without_a_decode_server_there_is_one_error() -> None:
    status, answer = asked([FakeServer(*COMPUTED)], [FakeServer(None)], {"prompt": "a"})
    assert status == 503
    assert "no decode server is ready" in json.loads(answer)["error"]["message"]


def test_a_stream_that_is_cut_off_ends_with_one_error() -> None:
    head = Head(200, [("content-type", "text/event-stream")])
    _, answer = asked([FakeServer(*COMPUTED)], [FakeServer(head, b"data: 1\n\n", None)], {"prompt": "a"})
    first, error, end = answer.split(b"\n\n")
    assert (first, end) == (b"data: 1", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_restarted"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": "a", "echo": True}, PATHS[1]),
        ({"prompt": "a", "prompt_logprobs": 0}, PATHS[1]),
        # another proxy stands before this one
        ({"prompt": "a", "kv_transfer_params": PARAMS}, PATHS[1]),
        ({"input": "a"}, "/v1/embeddings"),
        ([1], PATHS[0]),
    ],
)
def test_what_has_no_halves_is_passed_on(body: Any, path: str) -> None:
    prefill, decode = FakeServer(*COMPUTED), FakeServer(JSON, b"answer")
    assert asked([prefill], [decode], body, path) == (200, b"answer")
    assert (prefill.asked, decode.asked) == ([], [body])


def test_what_asks_for_nothing_does_not_matter() -> None:
    prefill, decode = FakeServer(*COMPUTED), FakeServer(JSON, b"answer")
    body = {"prompt": "a", "echo": False, "prompt_logprobs": None, "max_completion_tokens": None}
    assert asked([prefill], [decode], body)[0] == 200
    assert len(prefill.asked) == 1
    assert prefill.asked[0]["max_tokens"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prefill", "http://a:1"], "--decode"),
        (["--prefill", "a:1", "--decode", "http://b:1"], "a:1: must be the address of a server"),
        (["--prefill", "http://a:x", "--decode", "http://b:1"], "http://a:x: must be"),
        (["--prefill", "http://a:1/v1", "--decode", "http://b:1"], "http://a:1/v1: must be"),
        (["--prefill", "http://a", "--decode", "http://b", "--port", "x"], "--port x"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")
    assert main(["route", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
