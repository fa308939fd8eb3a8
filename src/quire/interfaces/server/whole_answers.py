"""An endpoint without HTTP: from the bytes of a request to the bytes of its whole answer.

HTTP and batches prepare a request with the same function. Over HTTP a client may leave, or want a stream; here nobody
does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from quire.interfaces.server.request_body import read_whole
from quire.interfaces.server.state import ServerState
from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.field_rules import FieldRules
from quire.interfaces.server.wire.json_answer import pieces_of

_T = TypeVar("_T", bound=msgspec.Struct)


class Prepared(Protocol):
    """A request that is checked and not started."""

    async def whole(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class WholeAnswers(Generic[_T]):
    request_type: type[_T]
    rules: FieldRules
    # raises for what is wrong with the request
    prepare: Callable[[_T, ServerState], Awaitable[Prepared]]
    # the list of the answer that may be long
    long_field: str

    async def answer(self, data: bytes, state: ServerState) -> bytes:
        """On behalf of the current caller. Raises what the request is refused with, or failed of."""
        state.check_ready()
        body = await read_whole(data, self.request_type, self.rules, state)
        for name in ("stream", "background"):
            if getattr(body, name, None):
                raise invalid(f"{name}: not in a batch, which brings whole answers. Leave it out.", name)
        prepared = await self.prepare(body, state)
        with state.in_flight.enter():
            answer = await prepared.whole()
        return b"".join(await pieces_of(answer, self.long_field))
