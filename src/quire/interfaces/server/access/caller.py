"""Who the running request comes from. Set by the gate before any endpoint runs, so no endpoint can forget it.

It is found in the context of the running task, and of tasks that were started from there. Work that no HTTP request
stands behind (a batch in the background) is done in `acting_for(caller)`, with the caller of the request that asked
for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from quire.interfaces.gateway.access.tenants import NOBODY, Tenant, Tenants
from quire.interfaces.gateway.access.waiting_room import WaitingRoom
from quire.messages import Tenancy


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from, and what it may use. Owns nothing: tenants and room belong to the server."""

    tenant: Tenant = NOBODY
    tenants: Tenants = field(default_factory=Tenants)
    room: WaitingRoom = field(default_factory=WaitingRoom)
    # may use the endpoints of whoever runs the server
    is_admin: bool = False
    request_id: str = ""
    # nobody waits for the answer: clocks that end requests do not run
    is_patient: bool = False

    @property
    def tenancy(self) -> Tenancy | None:
        """What the engine is told of the tenant."""
        return self.tenants.tenancy(self.tenant)

    def check_priority(self, priority: int) -> None:
        self.tenants.check_priority(self.tenant, priority)

    def check_room(self, num_requests: int, num_tokens: int = 0, *, num_prompts: int = 1) -> None:
        """Raises 429 if so many sequences would find no place now; for endpoints, before they render."""
        self.room.check(self.tenant, num_requests, num_tokens, num_prompts=num_prompts)


def new_request_id() -> str:
    """Of a request whose client has given none."""
    return f"req_{secrets.token_hex(12)}"


_CALLER: ContextVar[Caller] = ContextVar("caller")


def current_caller() -> Caller:
    """Of the running request; outside of any, that of a server without tenants whose queue is empty."""
    return _CALLER.get(None) or Caller()


@contextmanager
def acting_for(caller: Caller) -> Iterator[None]:
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        _CALLER.reset(token)
