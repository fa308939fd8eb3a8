"""All sessions of a server, by id: whose they are, how many may be, and when one that nobody uses ends."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.gateway.sessions.kept_session import KeptSession
from quire.interfaces.server.access.caller import current_caller
from quire.interfaces.server.wire.errors import ApiError

# Of sessions that have ended it is remembered why, of so many.
_MAX_REMEMBERED = 10_000
CLOSED = "session_closed"
EXPIRED = "session_expired"
UNKNOWN = "session_not_found"
_WHY = {
    CLOSED: "was closed",
    EXPIRED: "was not used for longer than session_idle_timeout and is closed",
    UNKNOWN: "does not exist. Sessions end with the server; open another one",
}


class Sessions:
    """Owns the sessions and the task that ends idle ones."""

    def __init__(
        self,
        engine: Callable[[], AsyncLLM],
        *,
        max_sessions: int,
        max_tokens: int | None,
        idle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bounds of what one tenant may keep; None: there is none."""
        self._engine = engine
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self.idle_seconds = idle_seconds
        self._clock = clock
        self._by_id: dict[str, KeptSession] = {}
        self._num_opening: dict[str, int] = {}
        self._ended: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._reaper: asyncio.Task[None] | None = None

    @property
    def now(self) -> float:
        return self._clock()

    async def open(self, tenant: str, cache_salt: str) -> KeptSession:
        with self._one_more(tenant):
            session_id = _new_id()
            tenancy = current_caller().tenancy
            engine_session = await self._engine().open_session(session_id, cache_salt=cache_salt, tenant=tenancy)
            return self._enter(KeptSession(session_id, tenant, engine_session, self.now, self.now, int(time.time())))

    async def fork(self, kept: KeptSession) -> KeptSession:
        """Another session with the same past. Both hold the same blocks."""
        kept.check_free()
        self.check_room(kept.tenant, kept.num_tokens)
        with self._one_more(kept.tenant):
            session_id = _new_id()
            # of this moment: a turn may end while the engine forks
            messages = kept.messages.copy()
            turns = kept.turns.copy()
            kind = kept.kind
            with kept.claimed():
                engine_session = await kept.engine_session.fork(session_id)
            fork = KeptSession(session_id, kept.tenant, engine_session, self.now, self.now, int(time.time()), kept.id)
            fork.messages = messages
            fork.turns = turns
            fork.kind = kind
            return self._enter(fork)

    async def rewind(self, kept: KeptSession, num_turns: int | None, num_tokens: int | None) -> None:
        kept.check_free()
        num_left, turns = kept.kept_by(num_turns, num_tokens)
        with kept.claimed():
            await kept.engine_session.rewind(num_left)
            kept.rewound(turns)

    async def close(self, kept: KeptSession, why: str = CLOSED) -> None:
        """Gives its memory back; a turn in flight is aborted."""
        if self._by_id.pop(kept.id, None) is not None:
            self._ended[kept.id] = (kept.tenant, why)
            while len(self._ended) > _MAX_REMEMBERED:
                self._ended.popitem(last=False)
        kept.is_closed = True
        await kept.engine_session.close()

    def find(self, session_id: str, tenant: str) -> KeptSession:
        """Raises 404 with a code that says what became of it. Asking counts as use."""
        kept = self._by_id.get(session_id)
        if kept is not None and kept.tenant == tenant and not self._is_over(kept):
            kept.used = self.now
            return kept
        code = self._ended.get(session_id, ("", UNKNOWN))[1] if self._was_of(session_id, tenant) else UNKNOWN
        if kept is not None and kept.tenant == tenant:
            code = EXPIRED
        raise ApiError(404, f"Session {session_id[:64]!r} {_WHY[code]}.", param="session_id", code=code)

    def of(self, tenant: str) -> list[KeptSession]:
        """Oldest first."""
        return [kept for kept in self._by_id.values() if kept.tenant == tenant and not self._is_over(kept)]

    def check_room(self, tenant: str, num_more: int = 0) -> None:
        """Raises 429 if the tenant's sessions are as long as they may be."""
        limit = self._max_tokens
        if limit is None:
            return
        num_kept = sum(kept.num_tokens for kept in self.of(tenant))
        if num_kept + num_more >= limit:
            raise _too_much(
                f"Your sessions keep {num_kept:,} tokens, of {limit:,} that they may (option max_session_tokens). "
                "Close or rewind some."
            )

    async def sweep(self) -> None:
        """Closes what nobody has used for too long."""
        for kept in [kept for kept in self._by_id.values() if self._is_over(kept)]:
            await self.close(kept, EXPIRED)

    async def stop(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
            self._reaper = None

    # ------------------------------------------------------------------------------------------ inside

    @contextlib.contextmanager
    def _one_more(self, tenant: str) -> Iterator[None]:
        """Counts those that are being opened, so that many at a time do not pass the bound."""
        num_opening = self._num_opening.get(tenant, 0)
        num_open = len(self.of(tenant)) + num_opening
        if num_open >= self._max_sessions:
            raise _too_much(
                f"{num_open} sessions are open, of {self._max_sessions} that may be (option max_sessions). "
                "Close one that is no longer needed."
            )
        self._num_opening[tenant] = num_opening + 1
        try:
            yield
        finally:
            self._num_opening[tenant] -= 1
            if not self._num_opening[tenant]:
                del self._num_opening[tenant]

    def _enter(self, kept: KeptSession) -> KeptSession:
        self._by_id[kept.id] = kept
        if self._reaper is None or self._reaper.done():
            self._reaper = asyncio.create_task(self._reap())
        return kept

    async def _reap(self) -> None:
        while self._by_id:
            oldest = min((kept.used for kept in self._by_id.values() if not kept.is_busy), default=self.now)
            await asyncio.sleep(max(0.05, oldest + self.idle_seconds - self.now))
            await self.sweep()

    def _is_over(self, kept: KeptSession) -> bool:
        return not kept.is_busy and self.now - kept.used >= self.idle_seconds

    def _was_of(self, session_id: str, tenant: str) -> bool:
        return session_id in self._ended and self._ended[session_id][0] == tenant


def _too_much(text: str) -> ApiError:
    # the official clients repeat a request after 429; nothing gets better by itself here
    return ApiError(429, text, type="requests", code="session_limit", headers={"x-should-retry": "false"})


def _new_id() -> str:
    return f"sess_{secrets.token_hex(16)}"
