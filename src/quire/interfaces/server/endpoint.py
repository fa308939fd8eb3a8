"""An endpoint that answers with what the engine generates: one way from a request to its answer, whole or as a stream,
over HTTP or for a line of a batch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.datastructures import State

from quire.interfaces.server.access.in_flight import InFlight, until_disconnect
from quire.interfaces.server.event_stream import EventStream, folded
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.field_rules import FieldRules
from quire.interfaces.server.wire.json_answer import long_json_answer, pieces_of

_T = TypeVar("_T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[_T]):
    """What it takes, and the function that makes an answer of it."""

    request_type: type[_T]
    rules: FieldRules
    # checked and not started; raises for what is wrong with the request
    answer: Callable[[_T, State], Awaitable[Any]]
    # what makes one object of it
    fold: Callable[[Any], Awaitable[Any]] = folded

    async def respond(self, request: Request) -> Response:
        """Over HTTP, on behalf of the current caller."""
        body = await read_request(request, self.request_type, self.rules)
        answer = await self.answer(body, request.app.state)
        return await respond(request, answer, is_stream=bool(getattr(body, "stream", False)), fold=self.fold)

    async def whole(self, data: bytes, state: State) -> bytes:
        """Without HTTP: nobody leaves, and nobody wants a stream. Raises what the request is refused with, or failed
        of."""
        state.serving.check_ready()
        body: _T = await state.bodies.read_bytes(data, self.request_type, self.rules)
        for name in ("stream", "background"):
            if getattr(body, name, None):
                raise invalid(f"{name}: not in a batch, which brings whole answers. Leave it out.", name)
        answer = await self.answer(body, state)
        with state.in_flight.enter():
            whole = await self.fold(answer)
        return b"".join(await pieces_of(whole, answer.long_field))


async def respond(
    request: Request, answer: Any, *, is_stream: bool, fold: Callable[[Any], Awaitable[Any]] = folded
) -> Response:
    """The answer, on its way as long as its client is there."""
    in_flight: InFlight = request.app.state.in_flight
    if is_stream:
        return EventStream(in_flight, answer)
    whole = await until_disconnect(in_flight, request.receive, fold(answer))
    return await long_json_answer(whole, answer.long_field)
