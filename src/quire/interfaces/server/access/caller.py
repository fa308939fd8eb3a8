"""Who the running request comes from, and whether it may enter. Set by the gate before any endpoint runs, so no
endpoint can forget it.

It is found in the context of the running task, and of tasks that were started from there. Work that no HTTP request
stands behind (a batch in the background) is done in `acting_for(caller)`.

What keys, tenants and queues are, the gateway knows. The server asks a `Door` who calls, and each caller's `Admission`
whether there is room; the ones here let everybody in.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.interfaces.server.wire.errors import ApiError, unavailable
from quire.messages import Tenancy

# sequences and prompt tokens of one prompt
Size = tuple[int, int]
Header = tuple[bytes, bytes]
# Greater numbers give way; a client's own is 0 unless it says otherwise.
BACKGROUND_PRIORITY = 1000


class Reservation(Protocol):
    """The room that one accepted request takes, until `close`. Its prompts begin one by one."""

    has_begun: bool

    def begin(self, number: int) -> None:
        """The prompt of this number is being computed. Only the first call counts."""

    def add_tokens(self, *, num_prompt: int = 0, num_cached: int = 0) -> None: ...
    def add_generated(self, count: int) -> None: ...
    def close(self) -> None:
        """All is over, or nothing will come of it. May be called again."""


class Admission(Protocol):
    """What callers may have. Times are in seconds; `tenant` is the caller's, and means nothing to anybody else."""

    @property
    def queue_seconds(self) -> float:
        """The longest wait before a request begins."""

    @property
    def request_seconds(self) -> float:
        """The longest time from a request's acceptance to its end."""

    def max_sequences(self, tenant: Any) -> int | None:
        """At a time, of one request that could do with fewer; None: no bound."""

    def check(self, tenant: Any, num_sequences: int, num_tokens: int = 0, *, num_prompts: int = 1) -> None:
        """Raises 429 if so many sequences would find no place now; for endpoints, before they render."""

    def check_priority(self, tenant: Any, priority: int) -> None:
        """Raises RequestError for one that is more important than the caller may ask for."""

    def admit(self, tenant: Any, sizes: Sequence[Size], *, is_arriving: bool = False) -> Reservation:
        """Places for all prompts, or 429 and nothing has changed. `is_arriving`: it waits for its own client."""

    def waited_too_long(self) -> ApiError:
        """What ends one whose time in the queue is over."""


class _NoBound:
    """The reservation of a request that nobody counts."""

    def __init__(self) -> None:
        self.has_begun = False

    def begin(self, number: int) -> None:
        self.has_begun = True

    def add_tokens(self, *, num_prompt: int = 0, num_cached: int = 0) -> None: ...
    def add_generated(self, count: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EverybodyMayEnter:
    """The admission of a server without a gateway: no queue has an end, only times have."""

    queue_seconds: float = 60.0
    request_seconds: float = 600.0

    def max_sequences(self, tenant: Any) -> None: ...
    def check(self, tenant: Any, num_sequences: int, num_tokens: int = 0, *, num_prompts: int = 1) -> None: ...
    def check_priority(self, tenant: Any, priority: int) -> None: ...

    def admit(self, tenant: Any, sizes: Sequence[Size], *, is_arriving: bool = False) -> Reservation:
        return _NoBound()

    def waited_too_long(self) -> ApiError:
        return unavailable(f"The request waited for {self.queue_seconds:g} s and had not begun (max_queue_seconds).")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from, and what it may use. Owns nothing."""

    # of the tenant; what one stores is not there for another
    name: str = ""
    # what the engine is told of it
    tenancy: Tenancy | None = None
    admission: Admission = field(default_factory=EverybodyMayEnter)
    # whose places its requests take
    tenant: Any = None
    # may use the endpoints of whoever runs the server
    is_admin: bool = False
    # nobody else uses this server, so what all do is its own
    is_alone: bool = True
    request_id: str = ""
    # nobody waits for the answer: it gives way to others, and clocks that end requests do not run
    is_patient: bool = False

    def priority(self, asked: int | None) -> int:
        """What a request gets that asks for this one. Raises RequestError for one that it may not have."""
        priority = asked or 0
        self.admission.check_priority(self.tenant, priority)
        return max(priority, BACKGROUND_PRIORITY) if self.is_patient else priority


class Door(Protocol):
    """Tells who calls, before anything else happens."""

    @property
    def needs_key(self) -> bool:
        """Of everybody."""

    def caller(self, headers: Iterable[Header], request_id: str, *, is_public: bool) -> Caller:
        """Raises 401 for a key that is missing or wrong, where one is needed."""


@dataclass(frozen=True, slots=True)
class OpenDoor:
    """No keys: everybody is the same caller."""

    admission: Admission = field(default_factory=EverybodyMayEnter)
    needs_key: bool = False

    def caller(self, headers: Iterable[Header], request_id: str, *, is_public: bool) -> Caller:
        return Caller(admission=self.admission, request_id=request_id)


def new_request_id() -> str:
    """Of a request whose client has given none: 32 characters, as programs written for vLLM expect."""
    return f"req_{secrets.token_hex(14)}"


def new_id(prefix: str) -> str:
    """Never a client's id: two clients may send the same one."""
    return f"{prefix}-{secrets.token_hex(12)}"


_CALLER: ContextVar[Caller] = ContextVar("caller")


def current_caller() -> Caller:
    """Of the running request; outside of any, that of a server without a gateway."""
    return _CALLER.get(None) or Caller()


def tenant_of() -> str:
    """Who asks, as the door said. What one tenant stores is not there for another."""
    return current_caller().name


@contextmanager
def acting_for(caller: Caller) -> Iterator[None]:
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        _CALLER.reset(token)


# Answered without a key, and at any time.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/version"})
# POST. Nothing of them is kept, so any process and any copy of the server answers them; new ones are entered here.
STATELESS_PATHS = frozenset({
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/rerank",
    "/v1/score",
    "/v2/embed",
    "/v2/rerank",
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/invocations",
    "/tokenize",
    "/detokenize",
})  # fmt: skip


async def admins_only() -> None:
    """For the routers of whoever runs the server: `APIRouter(dependencies=[Depends(admins_only)])`."""
    if not current_caller().is_admin:
        text = (
            "Only with the administrator's key (option admin_api_key): Authorization: Bearer KEY. Where no key is set, "
            "only from the machine itself: ask it as localhost or 127.0.0.1, and not through a proxy."
        )
        raise ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


async def overseers_only() -> None:
    """The same for what shows the work of all tenants: who is alone on a server sees nobody else in it."""
    caller = current_caller()
    if not (caller.is_alone or caller.is_admin):
        raise ApiError(
            403,
            "This shows what all tenants of this server do, so it is for its administrator: with the key of "
            "admin_api_key, or on the port of admin_port.",
            type="permission_error",
            code="administrators_only",
        )
