"""The front of several servers: gives each request to one of them, and passes on what it says.

    client --- HTTP ---> front (Ray Serve's ingress) ---> copy 0: a server of its own, with its engine
                           Router                    ---> copy 1

It knows texts, not tokens: a prompt is the body of a request, cut into pieces that are named by everything before them,
and a copy holds the pieces of what it has answered. A copy that is lost before it has said anything costs its clients
nothing: another one answers. Copies come and go. Knows nothing of Ray; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextvars import Context
from dataclasses import dataclass
from typing import Protocol

import msgspec

from quire.interfaces.server.access.caller import STATELESS_PATHS
from quire.routing import Router

# Of a text that is a piece, about as many tokens as a block has.
_PIECE_BYTES = 64
_PIECE_TOKENS = 16
# Pieces that are remembered of all copies; the oldest are forgotten.
_MOST_PIECES = 200_000
# The event loop names the pieces of a prompt up to here, and looks into no longer body: all others wait meanwhile.
_MOST_PROMPT_BYTES = 512 * 1024
_MOST_BODY_BYTES = 8 * 1024 * 1024
_LOOK_SECONDS = 0.5
# Copies that one request may be lost with: it may be what ends them.
_MOST_LOST = 2
# for the answer whether a copy is ready, and for a connection to it
READY_SECONDS = 10.0
# in the order in which they stand in a prompt, more or less
_PROMPT_FIELDS = ("model", "tools", "system", "messages", "prompt", "input")
_EVENT_STREAM = "text/event-stream"
# What one copy keeps for itself has no place behind a front of several.
_ROUTES = STATELESS_PATHS | {"/v1/models", "/version"}
HEALTH_PATHS = ("/health", "/health/live", "/health/ready", "/ping")
logger = logging.getLogger("quire.deploy")

Fields = dict[str, msgspec.Raw]
_decoder = msgspec.json.Decoder(Fields)


@dataclass(frozen=True)
class Request:
    method: str
    # path and query
    target: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True)
class Head:
    """What an answer begins with."""

    status: int
    headers: list[tuple[str, str]]

    @property
    def is_event_stream(self) -> bool:
        return any(name.lower() == "content-type" and value.startswith(_EVENT_STREAM) for name, value in self.headers)


class NotReachedError(Exception):
    """Nothing of the request came to the server."""


class Copy(Protocol):
    """One server, wherever it runs."""

    def answer(self, request: Request) -> AsyncIterator[Head | bytes]:
        """Its head, then the body in parts. Raises NotReachedError, or whatever there is once it is lost."""

    async def is_ready(self) -> bool:
        """Raises, or says no, where it takes no requests."""


class Front:
    def __init__(
        self,
        reach: Callable[[str], Copy],
        policy: str = "least_time",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        *,
        kind: str = "copy of the server",
        part_seconds: float | None = None,
    ) -> None:
        """`reach`: the copy of that name. `kind`: what it is called where somebody reads of it. `part_seconds`: a copy
        that has said nothing of a request for so long is lost, and another one is asked if it had not begun to answer;
        None: it may take its time."""
        self._kind = kind
        self._part_seconds = part_seconds
        self._reach = reach
        self._sleep = sleep
        self._copies: dict[int, Copy] = {}
        self._numbers: dict[str, int] = {}
        self._router = Router(policy, _PIECE_TOKENS)
        self._num_begun = 0
        self._key = secrets.token_bytes(16)
        self._held: OrderedDict[tuple[int, int], None] = OrderedDict()
        # of copies that are lost, until they are back
        self._watches: dict[int, asyncio.Task[None]] = {}

    def copies_are(self, names: Collection[str]) -> None:
        """New ones take requests from now on. One that is gone gets no more, and may end what it has."""
        for name in [name for name in self._numbers if name not in names]:
            number = self._numbers.pop(name)
            del self._copies[number]
            self._router.remove(number)
            if number in self._watches:
                self._watches.pop(number).cancel()
        for name in sorted(set(names) - self._numbers.keys()):
            number = next(number for number in itertools.count() if number not in self._copies)
            self._numbers[name] = number
            self._copies[number] = self._reach(name)
            self._router.add(number)

    @property
    def num_serving(self) -> int:
        return len(self._router)

    async def answer(self, request: Request) -> tuple[Head, AsyncGenerator[bytes, None]]:
        """The first copy's that says anything. Whoever has the rest reads or closes it; so long it counts as open."""
        path = request.target.partition("?")[0]
        if path in HEALTH_PATHS:
            return _answered(200 if self.num_serving else 503, {"serving": self.num_serving, "of": len(self._copies)})
        if path not in _ROUTES and not _is_of_a_model(path):
            return _refused(
                404,
                f"{path}: is not there behind several copies of a server. Sessions, files, batches and stored "
                "responses would be one copy's; use quire serve for them.",
                "not_found",
            )
        pieces = self._pieces_of(request.body)
        num_tokens = len(request.body) * _PIECE_TOKENS // _PIECE_BYTES + 1
        num_lost = 0
        while self.num_serving:
            choice = self._router.choose(pieces, num_tokens)
            self._num_begun += 1
            name = self._num_begun
            self._router.begin(name, choice, pieces, num_tokens)
            copy = self._copies[choice.replica]
            parts = copy.answer(request)
            try:
                head = await self._next_of(parts)
                assert isinstance(head, Head)
                # A server that serves all others says so too: to who waited too long, or asks for a model that fails.
                if head.status != 503 or self.num_serving == 1 or await _is_ready(copy):
                    rest = self._rest(name, choice.replica, copy, head, parts, pieces)
                    # what has not begun would not notice that it is closed
                    await anext(rest)
                    return head, rest
            except asyncio.CancelledError:
                self._router.end(name)
                raise
            except NotReachedError:
                logger.warning("%s %d cannot be reached", self._kind, choice.replica)
            except Exception as error:
                logger.warning("%s %d is lost: %s", self._kind, choice.replica, type(error).__name__)
                num_lost += 1
            self._lose(choice.replica, copy)
            if num_lost == _MOST_LOST:
                text = f"{num_lost} servers were lost while they answered this request. It is sent to no other one."
                return _refused(500, text, "engine_restarted")
        return _refused(503, f"no {self._kind} is ready. Try again soon.", "engine_restarted")

    async def _next_of(self, parts: AsyncIterator[Head | bytes]) -> Head | bytes | None:
        async with asyncio.timeout(self._part_seconds):
            return await anext(parts, None)

    async def _rest(
        self, name: int, number: int, copy: Copy, head: Head, parts: AsyncIterator[Head | bytes], pieces: list[int]
    ) -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            while (part := await self._next_of(parts)) is not None:
                assert isinstance(part, bytes)
                self._router.first_token(name)
                yield part
            # whoever refuses has computed nothing
            if head.status < 400 and self._copies.get(number) is copy:
                self._holds(number, pieces)
        except Exception as error:
            logger.warning("%s %d is lost in the middle of an answer: %s", self._kind, number, type(error).__name__)
            self._lose(number, copy)
            if not head.is_event_stream:
                # the length was promised, or its end is in a frame: the client sees that it is cut off
                raise
            yield b"data: " + _error("the server that answered was lost. Try again.", "engine_restarted") + b"\n\n"
        finally:
            self._router.end(name)

    def _holds(self, number: int, pieces: list[int]) -> None:
        self._router.stored(number, pieces)
        for piece in pieces:
            self._held[number, piece] = None
            self._held.move_to_end((number, piece))
        while len(self._held) > _MOST_PIECES:
            (holder, oldest), _ = self._held.popitem(last=False)
            self._router.removed(holder, [oldest])

    def _lose(self, number: int, copy: Copy) -> None:
        """It gets no requests until it says that it is ready."""
        if self._copies.get(number) is not copy:
            return  # it is gone, and another one may have its number
        self._router.remove(number)
        if number not in self._watches:
            # no part of the request by which the loss was seen
            self._watches[number] = asyncio.create_task(self._watch(number, copy), context=Context())

    async def _watch(self, number: int, copy: Copy) -> None:
        while True:
            await self._sleep(_LOOK_SECONDS)
            if await _is_ready(copy):
                break
        del self._watches[number]
        self._router.add(number)
        logger.warning("%s %d serves again", self._kind, number)

    def _pieces_of(self, body: bytes) -> list[int]:
        """Names of the pieces of a prompt, each of all that stands before its end."""
        text = _prompt_of(body)
        digest = hashlib.blake2b(digest_size=8, key=self._key)
        pieces = []
        for begin in range(0, len(text) - _PIECE_BYTES + 1, _PIECE_BYTES):
            digest.update(text[begin : begin + _PIECE_BYTES])
            pieces.append(int.from_bytes(digest.copy().digest(), "big"))
        return pieces


async def _is_ready(copy: Copy) -> bool:
    try:
        async with asyncio.timeout(READY_SECONDS):
            return await copy.is_ready()
    except Exception:
        return False


def _is_of_a_model(path: str) -> bool:
    """Dots would lead out of there, to what the servers behind have for themselves."""
    return path.startswith("/v1/models/") and not {".", ".."} & {*path.split("/")}


def fields_of(body: bytes) -> Fields | None:
    """As they are written: only few of them are looked into. None: this is no JSON object."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _prompt_of(body: bytes) -> bytes:
    """What of a request is computed, as its beginning: other fields differ where prompts do not."""
    if len(body) > _MOST_BODY_BYTES:
        return b""
    fields = fields_of(body) or {}
    kept = (bytes(fields[name])[:_MOST_PROMPT_BYTES] for name in _PROMPT_FIELDS if name in fields)
    # the end of one text is not the beginning of what follows it: brackets stay out
    return b"".join(kept)[:_MOST_PROMPT_BYTES].rstrip(b'"]} \r\n\t')


def _error(text: str, code: str) -> bytes:
    return json.dumps({"error": {"message": text, "type": "server_error", "param": None, "code": code}}).encode()


def _refused(status: int, text: str, code: str) -> tuple[Head, AsyncGenerator[bytes, None]]:
    return _whole(status, _error(text, code))


def _answered(status: int, fields: dict[str, int]) -> tuple[Head, AsyncGenerator[bytes, None]]:
    return _whole(status, json.dumps(fields).encode())


def _whole(status: int, body: bytes) -> tuple[Head, AsyncGenerator[bytes, None]]:
    async def parts() -> AsyncGenerator[bytes, None]:
        yield body

    return Head(status, [("content-type", "application/json"), ("content-length", str(len(body)))]), parts()
