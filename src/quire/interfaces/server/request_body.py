"""From bytes to a checked struct: size, media type, JSON, names of fields, types. One error, the first that is found.

One error and not a list of all: a small body must not be able to buy a huge answer.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.server.access.in_flight import InFlight
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.wire.errors import CLOSE, ApiError, ClientGoneError, dialect_of, idle, invalid
from quire.interfaces.server.wire.field_rules import FieldRules
from quire.interfaces.server.wire.json_scan import JsonBounds, JsonScan, check_json
from quire.interfaces.turnstile import Turnstile

# A refused body is read on and thrown away up to this size, because a client that is still sending misses the answer.
_MAX_DISCARDED_BYTES = 256 * 1024 * 1024

# And one that sends no more gets its answer.
_DISCARD_SECONDS = 1.0

# What is longer is put together in a turn of the event loop of its own and parsed in another one: 8 MiB take 5 to 10 ms
# each time, and up to 40 where the process has to get the memory for it.
_LONG_BYTES = 256 * 1024

USUAL_BOUNDS = JsonBounds()
# what stands beside a prompt of token ids
_OTHER_VALUES = 4096

_T = TypeVar("_T", bound=msgspec.Struct)
_CONTENT_TYPE = re.compile(r'application/json\s*(;\s*charset="?utf-8"?\s*)?', re.IGNORECASE)
_FORM = "application/x-www-form-urlencoded"
_OF_BROWSERS = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode", "cookie")
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
_MOST_KEYS_SHOWN = 8
_MISMATCH = re.compile(r"Expected `([^`]*)`, got `([^`]*)`(?: - at `(?:key` in `)?\$\.?([^`]*)`)?")
_MISSING = re.compile(r"Object missing required field `([^`]*)`(?: - at `\$\.?([^`]*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?")
# an escape of half a pair, behind an even number of backslashes
_LONE_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89a-fA-F][0-9a-fA-F]{2})")
_PLACE = re.compile(r"\(byte ([0-9]+)\)")
# the decoder stands behind a pair of them, or at the end of the text
_BYTES_OF_A_PAIR = 12
_WORDS = {
    "int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false", "null": "null",
    "array": "a list", "object": "an object",
}  # fmt: skip


class BodyChunks:
    """The body of a request chunk by chunk, for whoever reads it while it arrives. One reader at a time."""

    def __init__(self, request: Request) -> None:
        self._receive = request.receive
        self.is_over = False

    async def take(self) -> bytes:
        """The next one, which may be empty."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self.is_over = not message.get("more_body")
        chunk: bytes = message.get("body", b"")
        return chunk

    async def discard(self, seconds: float) -> None:
        """Reads what is still on its way: a client that is sending misses an answer that comes too early."""
        with suppress(TimeoutError, ClientGoneError):
            async with asyncio.timeout(seconds):
                while not self.is_over:
                    await self.take()


class Bodies:
    """Reads the bodies of requests, within the bounds of one server."""

    def __init__(self, options: ServerOptions, in_flight: InFlight) -> None:
        self.strict = options.strict
        self._max_bytes = options.max_text_body_bytes
        self._whole_seconds = options.max_request_seconds
        self._part_seconds = options.first_byte_seconds
        self._in_flight = in_flight
        # one of them is put together or parsed in a turn of the event loop
        self._long_ones = Turnstile(1)
        self._bounds = USUAL_BOUNDS

    def serve(self, engine: AsyncLLM) -> None:
        """A prompt as long as the model takes may always be sent as token ids."""
        most = engine.ready.max_model_len + _OTHER_VALUES
        self._bounds = JsonBounds(values=max(USUAL_BOUNDS.values, most))

    async def read(
        self,
        request: Request,
        request_type: type[_T],
        rules: FieldRules,
        *,
        strict: bool = False,
        is_optional: bool = False,
    ) -> _T:
        """The body as `request_type`, or ApiError. `is_optional`: no body at all asks for what `{}` asks for."""
        if is_optional and not _has_body(request):
            return request_type()
        data = await self.read_whole(request)
        return parse_request(data, request_type, rules, strict=strict or self.strict)

    async def read_whole(self, request: Request) -> bytes:
        """JSON within the bounds, that nobody has looked at yet."""
        _check_media_type(request)
        # a server that ends tells it so, and does not wait for a request that it does not know yet
        with self._in_flight.enter(is_awaited=False):
            return await self._whole_of(request)

    async def read_bytes(self, data: bytes, request_type: type[_T], rules: FieldRules) -> _T:
        """The same of a body that is there already, however long it is."""
        if len(data) > self._max_bytes:
            raise _too_large(self._max_bytes)
        refusal = await _refused(JsonScan(self._bounds), data)
        if refusal is not None:
            raise refusal
        if len(data) > _LONG_BYTES:
            await self._long_ones.enter()
        return parse_request(data, request_type, rules, strict=self.strict)

    async def _whole_of(self, request: Request) -> bytes:
        """Each part must come within `first_byte_seconds`, and the last one within the time that a request may take. It
        is counted while it comes."""
        max_bytes = self._max_bytes
        whole_seconds = self._whole_seconds
        clock = asyncio.get_running_loop().time
        end = clock() + whole_seconds
        length = request.headers.get("content-length", "")
        refusal = _too_large(max_bytes) if length.isdecimal() and int(length) > max_bytes else None
        body = BodyChunks(request)
        scan = JsonScan(self._bounds)
        chunks: list[bytes] = []
        size = 0
        while not (body.is_over or size > _MAX_DISCARDED_BYTES):
            seconds = self._part_seconds if refusal is None else _DISCARD_SECONDS
            try:
                async with asyncio.timeout(min(seconds, end - clock())):
                    chunk = await body.take()
            except TimeoutError:
                if refusal is not None:
                    break
                text = f"Nothing of the body came for {seconds:g} seconds (first_byte_seconds)."
                if clock() >= end:
                    text = f"The body did not come whole within {whole_seconds:g} seconds (max_request_seconds)."
                raise idle(text) from None
            size += len(chunk)
            if refusal is None:
                refusal = _too_large(max_bytes) if size > max_bytes else await _refused(scan, chunk)
                chunks.append(chunk)
            if refusal is not None:
                chunks.clear()
        if refusal is not None:
            raise refusal
        if size > _LONG_BYTES:
            await self._long_ones.enter()
        data = b"".join(chunks)
        if size > _LONG_BYTES:
            # others are put together before it is its turn: each would be there twice
            chunks.clear()
            # it is parsed in a turn of its own
            await self._long_ones.enter()
        return data


def read_text(data: bytes, request_type: type[_T], rules: FieldRules, *, strict: bool, what: str) -> _T:
    """The same of a text that is no body: a line, or a message of a socket. `what`: what errors call it."""
    check_json(data, USUAL_BOUNDS, what)
    return parse_request(data, request_type, rules, strict=strict, what=what)


@contextmanager
def _collector_waits(is_long: bool) -> Iterator[None]:
    """Two million lists are made in a third of the time where nobody looks through them meanwhile for what may go."""
    if not (is_long and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def parse_request(
    data: bytes, request_type: type[_T], rules: FieldRules, *, strict: bool = False, what: str = "body"
) -> _T:
    """JSON text that was counted, as `request_type`, or ApiError."""
    with _collector_waits(len(data) > _LONG_BYTES):
        body = _decoded(data, what)
        rules.check(body, strict=strict)
        try:
            return msgspec.convert(body, request_type, str_keys=True)
        except (msgspec.ValidationError, OverflowError) as error:
            raise _bad_key(body) or _explained(str(error), what) from None


def _decoded(data: bytes, what: str) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data)
    except UnicodeDecodeError:
        raise invalid(f"The {what} is not valid UTF-8.") from None
    except msgspec.MsgspecError as error:
        if escape := _lone_surrogate(data, str(error)):
            text = f"The {what} holds {escape}, a lone surrogate, which is no valid Unicode. Remove it."
            raise invalid(text) from None
        raise invalid(f"The {what} is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise invalid(f"The {what} must be a JSON object.")
    return body


def _lone_surrogate(data: bytes, error: str) -> str:
    """The escape at which the decoder has stopped, if it is one."""
    place = _PLACE.search(error)
    if place is not None and "surrogate" not in error:
        return ""
    end = int(place[1]) if place is not None else len(data)
    found = _LONE_SURROGATE.search(data, max(0, end - 2 * _BYTES_OF_A_PAIR), end + _BYTES_OF_A_PAIR)
    return found[1].decode() if found else ""


def _has_body(request: Request) -> bool:
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"


def _check_media_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    if not (_CONTENT_TYPE.fullmatch(content_type.strip()) or _is_unnamed_json(request, content_type.strip())):
        shown = repr(content_type[:64]) if content_type else "missing"
        raise ApiError(415, f"Content-Type is {shown}; it must be application/json, and the body UTF-8.")
    check_encoding(request)


def _is_unnamed_json(request: Request, content_type: str) -> bool:
    """Where Ollama's users write `curl -d`. A page of anybody can have a browser send a form: browsers say that they
    are one."""
    dialect = dialect_of(request.scope["path"])
    if dialect is None or not dialect.takes_unnamed_json or content_type.lower() not in ("", _FORM):
        return False
    return not any(name in request.headers for name in _OF_BROWSERS)


def check_encoding(request: Request) -> None:
    """No compression: a small body must not become a large one."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding {encoding[:32]!r} is not supported; send the body as it is.")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {in_bytes(max_bytes)}, the most that is taken here.", headers=CLOSE)


async def _refused(scan: JsonScan, chunk: bytes) -> ApiError | None:
    """A line of a batch comes as one chunk, however long it is."""
    try:
        for start in range(0, len(chunk), _LONG_BYTES):
            if start:
                await asyncio.sleep(0)
            scan.feed(chunk[start : start + _LONG_BYTES])
    except ApiError as error:
        return error
    return None


def in_bytes(count: int) -> str:
    return f"{count / 2**20:.4g} MiB" if count >= 2**20 else f"{count} bytes"


def _bad_key(body: dict[str, Any]) -> ApiError | None:
    """msgspec does not say which keys of logit_bias are no token ids."""
    bias = body.get("logit_bias")
    bad = [repr(key[:40]) for key in bias if not _TOKEN_ID.fullmatch(key)] if isinstance(bias, dict) else []
    if not bad:
        return None
    shown = ", ".join(bad[:_MOST_KEYS_SHOWN])
    what = f"the key {shown} is no token id" if len(bad) == 1 else f"the keys {shown} are no token ids"
    return invalid(f"logit_bias: {what}.", "logit_bias")


def _explained(text: str, what: str) -> ApiError:
    """msgspec's words about Python types, in words about JSON."""
    if found := _MISMATCH.search(text):
        wanted = " or ".join(_WORDS.get(kind.strip(), kind) for kind in found[1].split("|"))
        where = found[3] or ""
        return invalid(f"{where or what}: must be {wanted}, not {_WORDS.get(found[2], found[2])}.", where or None)
    if found := _MISSING.search(text):
        where = _joined(found[2], found[1])
        return invalid(f"{where}: this field is required.", where)
    if found := _UNKNOWN.search(text):
        where = _joined(found[2], found[1])
        return invalid(f"{where}: unknown field.", where)
    return invalid(f"The {what} is not as expected: {text}.")


def _joined(path: str | None, name: str) -> str:
    return f"{path}.{name}" if path else name


async def read_request(
    request: Request,
    request_type: type[_T],
    rules: FieldRules,
    *,
    strict: bool = False,
    is_optional: bool = False,
) -> _T:
    """With the bounds of the server that the request came to."""
    bodies: Bodies = request.app.state.bodies
    return await bodies.read(request, request_type, rules, strict=strict, is_optional=is_optional)
