"""What stands before a front of servers: keys, room for bodies, and bodies that do not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import httpx2 as httpx
import pytest
from starlette.requests import ClientDisconnect

from quire.interfaces.deploy.answering import BodyRoom
from quire.interfaces.deploy.front import Head, Request
from quire.interfaces.deploy.route import front_app
from quire.interfaces.gateway.access.access import Access
from quire.interfaces.gateway.access.api_keys import key_ring

CHATS = "/v1/chat/completions"


class HeldFront:
    """Answers with the target, once it may."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.targets: list[str] = []
        self.may_answer = asyncio.Event()
        if is_open:
            self.may_answer.set()

    async def answer(self, request: Request) -> tuple[Head, AsyncIterator[bytes]]:
        self.targets.append(request.target)

        async def parts() -> AsyncIterator[bytes]:
            await self.may_answer.wait()
            yield request.target.encode()

        return Head(200, []), parts()


def client_of(front: Any, room: BodyRoom, keys: Sequence[str] = ()) -> httpx.AsyncClient:
    app = front_app(front, Access(key_ring(keys)), room)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://front.test")


def test_only_who_has_a_key_is_passed_on() -> None:
    async def test() -> None:
        front = HeldFront()
        room = BodyRoom(10)
        async with client_of(front, room, ["first", "second"]) as client:
            for headers in ({}, {"authorization": "Bearer other"}, {"x-api-key": "other"}):
                # nor is a byte of the body read
                answer = await client.post(CHATS, content=b"longer than the room", headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["message"]
            assert front.targets == []
            assert (await client.get("/health")).status_code == 200
            for headers in ({"authorization": "Bearer second"}, {"x-api-key": "first"}):
                assert (await client.post(CHATS, content=b"short", headers=headers)).status_code == 200
            assert front.targets == ["/health", CHATS, CHATS]

    asyncio.run(test())


def test_an_answer_is_closed_for_a_client_that_left_before_it() -> None:
    """A front counts it among those that its server has until then."""

    class LeftFront:
        is_closed = False

        async def answer(self, request: Request) -> tuple[Head, AsyncGenerator[bytes, None]]:
            self.parts = self.said()
            await anext(self.parts)
            return Head(200, []), self.parts

        async def said(self) -> AsyncGenerator[bytes, None]:
            try:
                yield b"it has begun"
                yield b"and nobody reads it"
            finally:
                self.is_closed = True

    async def test() -> None:
        front = LeftFront()
        messages = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            raise OSError

        scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": "POST", "path": CHATS, "query_string": b"",
                 "headers": [], "client": None}  # fmt: skip
        with pytest.raises(ClientDisconnect):
            await front_app(front, Access(key_ring([])), BodyRoom(10))(scope, receive, send)
        assert front.is_closed

    asyncio.run(test())


def test_a_host_header_names_no_path() -> None:
    """What needs no key is decided by the path that is passed on."""

    async def test() -> None:
        front = HeldFront()
        async with client_of(front, BodyRoom(10), ["key"]) as client:
            await client.get("/health?a=b%20c", headers={"host": "x/v1/models?"})
        assert front.targets == ["/health?a=b%20c"]

    asyncio.run(test())


def test_all_bodies_together_have_so_much_room() -> None:
    async def test() -> None:
        front = HeldFront(is_open=False)
        room = BodyRoom(100, most_of_one=80)
        async with client_of(front, room) as client:
            first = asyncio.ensure_future(client.post(CHATS, content=b"a" * 60))
            while not front.targets:
                await asyncio.sleep(0)
            refused = await client.post(CHATS, content=b"b" * 60)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert (await client.post(CHATS, content=b"c" * 81)).status_code == 413
            assert room.num_taken == 60, "what is refused takes nothing"
            front.may_answer.set()
            assert (await first).status_code == 200
            assert room.num_taken == 0
            assert (await client.post(CHATS, content=b"b" * 60)).status_code == 200

    asyncio.run(test())


@pytest.mark.parametrize(("part_seconds", "whole_seconds"), [(0.01, 60.0), (60.0, 0.05)], ids=["stands still", "slow"])
def test_a_body_that_does_not_come_gives_its_room_back(part_seconds: float, whole_seconds: float) -> None:
    async def test() -> None:
        room = BodyRoom(100, part_seconds=part_seconds, whole_seconds=whole_seconds)

        async def body() -> AsyncIterator[bytes]:
            while True:
                yield b"{"
                await asyncio.sleep(0.02)

        async with client_of(HeldFront(), room) as client:
            answer = await client.post(CHATS, content=body())
        assert answer.status_code == 408
        assert room.num_taken == 0

    asyncio.run(test())


def test_one_client_does_not_take_the_room_of_all() -> None:
    async def test() -> None:
        front = HeldFront(is_open=False)
        room = BodyRoom(100)
        async with client_of(front, room, ["first", "second"]) as client:

            async def post(key: str, num_bytes: int) -> int:
                headers = {"authorization": f"Bearer {key}"}
                return (await client.post(CHATS, content=b"a" * num_bytes, headers=headers)).status_code

            held = [asyncio.ensure_future(post("first", 20)) for _ in range(2)]
            while len(front.targets) < 2:
                await asyncio.sleep(0)
            assert await post("first", 20) == 429
            other = asyncio.ensure_future(post("second", 60))
            while len(front.targets) < 3:
                await asyncio.sleep(0)
            front.may_answer.set()
            assert await asyncio.gather(*held, other) == [200] * 3
            assert (room.num_taken, dict(room.taken_by)) == (0, {})

    asyncio.run(asyncio.wait_for(test(), 20))
