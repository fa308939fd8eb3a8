"""The waiting room: requests that were accepted and have not begun. It has so many places and no more.

Whoever finds no place is told so at once, and when to come again; nothing is kept of it. Counted are sequences (n of
them for each prompt) and the tokens of prompts; an HTTP request gets places for all that it asks for, or none:

    accepted + rejected = offered          exactly, because a decision is one uninterrupted step

Owns the counts of each tenant. Knows no engine: endpoints say when a prompt begins and when all is over. A part of the
room is kept for each tenant (ledger.py).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from quire.errors import RequestError
from quire.interfaces.gateway.access.ledger import Ledger, OwnLedger, Throughput, TokenBucket
from quire.interfaces.gateway.access.tenants import NOBODY, Tenant
from quire.interfaces.server.access.caller import Size
from quire.interfaces.server.wire.errors import ApiError, rate_limited
from quire.observability.instruments import Counter

_ADVICE = "The request was not started. Send it again after the time in Retry-After."


@dataclass(slots=True)
class Use:
    """What a tenant uses now, and has used."""

    bucket: TokenBucket | None
    num_in_flight: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    ends: Throughput = field(default_factory=Throughput)


@dataclass(slots=True, kw_only=True)
class TenantReport:
    """The same for the administrator."""

    name: str
    weight: float
    num_requests: int
    num_queued_requests: int
    num_queued_tokens: int
    num_accepted: int
    num_rejected: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    # None: no limit
    tokens_left: int | None


class Reservation:
    """The room that one accepted request takes, until `close`. Its prompts begin one by one."""

    def __init__(self, room: WaitingRoom, number: int, tenant: Tenant, sizes: Sequence[Size]) -> None:
        self.number = number
        self.tenant = tenant
        self.has_begun = False
        self._room = room
        # prompts that wait
        self._waiting = dict(enumerate(sizes))
        self._num_sequences = sum(count for count, _ in sizes)
        self._is_over = False
        self._use = room.use_of(tenant)

    def begin(self, number: int) -> None:
        """The prompt of this number is being computed. Only the first call counts."""
        size = self._waiting.pop(number, None)
        if size is not None:
            self.has_begun = True
            self._room.leave(self, size, has_begun=True)

    def add_tokens(self, *, num_prompt: int = 0, num_cached: int = 0) -> None:
        """For the tenant's account."""
        self._use.num_prompt_tokens += num_prompt
        self._use.num_cached_tokens += num_cached
        self._room.charge(self._use, num_prompt)

    def add_generated(self, count: int) -> None:
        self._use.num_generated_tokens += count
        if self._use.bucket is not None:
            self._room.charge(self._use, count)

    def close(self) -> None:
        """All is over, or nothing will come of it. May be called again."""
        if self._is_over:
            return
        self._is_over = True
        for size in self._waiting.values():
            self._room.leave(self, size, has_begun=False)
        self._waiting.clear()
        self._room.end(self, self._num_sequences)

    def __del__(self) -> None:
        # of an answer that nobody began to read
        self.close()


class WaitingRoom:
    """Bounded in sequences and in prompt tokens. `clock` is monotonic."""

    def __init__(
        self,
        tenants: Iterable[Tenant] = (),
        *,
        max_requests: int = 1024,
        max_tokens: int | None = None,
        queue_seconds: float = 60.0,
        request_seconds: float = 600.0,
        rejections: Counter | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self.queue_seconds = queue_seconds
        self.request_seconds = request_seconds
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._weights = {name: tenant.quota.weight for name, tenant in self._tenants.items()}
        self._ledger = ledger or OwnLedger()
        self._requests = self._ledger.bound("requests", max_requests, self._weights)
        self._has_fixed_tokens = max_tokens is not None
        self._tokens = self._ledger.bound("tokens", 2**62 if max_tokens is None else max_tokens, self._weights)
        self._rejections = rejections or Counter("quire:rejected_total", "", ["why"])
        self._clock = clock
        self._uses: dict[str, Use] = {}
        self._numbers = itertools.count()
        # when those came that have not begun, by number; a stay that nobody holds any more must be able to end
        self._since: dict[int, float] = {}
        self._begun_requests = Throughput()
        self._begun_tokens = Throughput()

    # ------------------------------------------------------------------------------------------ what can be seen

    @property
    def max_requests(self) -> int:
        return self._requests.most

    @property
    def max_tokens(self) -> int:
        return self._tokens.most

    @property
    def num_requests(self) -> int:
        """Sequences that wait."""
        return self._requests.num_used

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts that wait."""
        return self._tokens.num_used

    @property
    def oldest_seconds(self) -> float:
        """How long the one that has waited longest has waited."""
        first = next(iter(self._since.values()), None)
        return 0.0 if first is None else self._clock() - first

    def use_of(self, tenant: Tenant) -> Use:
        if tenant.name not in self._uses:
            limit = tenant.quota.tokens_per_minute
            bucket = None if limit is None else self._ledger.bucket(tenant.name, limit, self._clock())
            self._uses[tenant.name] = Use(bucket)
        return self._uses[tenant.name]

    def report(self) -> list[TenantReport]:
        """What each tenant uses."""
        return [self._report_of(tenant) for tenant in self._tenants.values() or [NOBODY]]

    def _report_of(self, tenant: Tenant) -> TenantReport:
        use = self.use_of(tenant)
        return TenantReport(
            name=tenant.name,
            weight=tenant.quota.weight,
            num_requests=use.num_in_flight,
            num_queued_requests=self._requests.used_by(tenant.name),
            num_queued_tokens=self._tokens.used_by(tenant.name),
            num_accepted=use.num_accepted,
            num_rejected=use.num_rejected,
            num_prompt_tokens=use.num_prompt_tokens,
            num_cached_tokens=use.num_cached_tokens,
            num_generated_tokens=use.num_generated_tokens,
            tokens_left=None if use.bucket is None else math.floor(use.bucket.level(self._clock())),
        )

    # ------------------------------------------------------------------------------------------ coming and going

    def set_capacity(self, num_kv_tokens: int) -> None:
        """What the engine has room for: four times as much may wait, unless somebody said otherwise."""
        if not self._has_fixed_tokens:
            self._tokens = self._tokens.resized(4 * num_kv_tokens)

    def check(self, tenant: Tenant, num_requests: int, num_tokens: int = 0, *, num_prompts: int = 1) -> None:
        """Raises 429 if there is no room now: before anything is rendered, with what is known by then."""
        # what its client can make less of, if that is too much for ever
        name = "n" if num_prompts == 1 else "prompt"
        self._check_quota(tenant, self.use_of(tenant), num_requests, name)
        self._check_room(tenant, num_requests, num_tokens, name)

    def max_sequences(self, tenant: Tenant) -> int:
        """At a time, of one request that could do with fewer."""
        bounds = (self.max_requests, tenant.quota.max_requests, tenant.quota.max_queued)
        return min(bound for bound in bounds if bound is not None)

    def check_priority(self, tenant: Tenant, priority: int) -> None:
        """Among tenants the order is a matter of shares: one may let its requests wait, not push before the others."""
        if len(self._tenants) > 1 and priority < tenant.quota.priority:
            raise RequestError(
                f"priority={priority}: with this key {tenant.quota.priority} is the most important, because several "
                "tenants share the server. Ask for that or a greater number.",
                param="priority",
            )

    def admit(self, tenant: Tenant, sizes: Sequence[Size], *, is_arriving: bool = False) -> Reservation:
        """Places for all prompts, or 429 and nothing has changed. `is_arriving`: it waits for its own client."""
        num_requests = sum(count for count, _ in sizes)
        num_tokens = sum(count for _, count in sizes)
        use = self.use_of(tenant)
        with self._ledger.locked():
            self.check(tenant, num_requests, num_tokens, num_prompts=len(sizes))
            use.num_accepted += 1
            use.num_in_flight += num_requests
            self._ledger.note_in_flight(tenant.name, use.num_in_flight)
            self._requests.take(tenant.name, num_requests)
            self._tokens.take(tenant.name, num_tokens)
        use.num_prompt_tokens += num_tokens
        self.charge(use, num_tokens)
        reservation = Reservation(self, next(self._numbers), tenant, sizes)
        if not is_arriving:
            self._since[reservation.number] = self._clock()
        return reservation

    def leave(self, reservation: Reservation, size: Size, *, has_begun: bool) -> None:
        """A prompt needs its place no more."""
        num_requests, num_tokens = size
        self._since.pop(reservation.number, None)
        self._requests.give_back(reservation.tenant.name, num_requests)
        self._tokens.give_back(reservation.tenant.name, num_tokens)
        if has_begun:
            now = self._clock()
            self._begun_requests.add(num_requests, now)
            self._begun_tokens.add(num_tokens, now)

    def end(self, reservation: Reservation, num_sequences: int) -> None:
        self._since.pop(reservation.number, None)
        use = self.use_of(reservation.tenant)
        use.num_in_flight -= num_sequences
        self._ledger.note_in_flight(reservation.tenant.name, use.num_in_flight)
        use.ends.add(num_sequences, self._clock())

    def charge(self, use: Use, num_tokens: int) -> None:
        if use.bucket is not None and num_tokens:
            use.bucket.take(num_tokens, self._clock())

    def waited_too_long(self) -> ApiError:
        """The end of one whose time in the queue is over."""
        self._rejections.add(1, "queue_time")
        text = (
            f"The request waited for {self.queue_seconds:g} s and had not begun, which is as long as it may "
            f"(max_queue_seconds). {_ADVICE}"
        )
        headers = {"retry-after": str(self._queue_seconds(self._begun_requests, self.num_requests))}
        return ApiError(503, text, type="server_error", code="service_unavailable", headers=headers)

    # ------------------------------------------------------------------------------------------ refusing

    def _check_quota(self, tenant: Tenant, use: Use, num_requests: int, name: str) -> None:
        quota = tenant.quota
        now = self._clock()
        if use.bucket is not None and use.bucket.level(now) <= 0:
            text = f"This key has used its {quota.tokens_per_minute} tokens per minute (tokens_per_minute)."
            self._refuse(tenant, "tenant_tokens", text, use.bucket.seconds_until(1, now))
        num_in_flight = 0 if quota.max_requests is None else self._ledger.num_in_flight(tenant.name, use.num_in_flight)
        if quota.max_requests is not None and num_in_flight + num_requests > quota.max_requests:
            what = f"This key has {num_in_flight} requests in flight, at most {quota.max_requests} are allowed"
            _check_possible(num_requests, quota.max_requests, name, "sequences", f"max_requests={quota.max_requests}")
            too_many = num_in_flight + num_requests - quota.max_requests
            rate = self._ledger.num_processes * use.ends.rate(now)
            self._refuse(tenant, "tenant_requests", f"{what} (max_requests).", too_many / rate if rate else 1.0)
        queued = self._requests.used_by(tenant.name)
        if quota.max_queued is not None and queued + num_requests > quota.max_queued:
            _check_possible(num_requests, quota.max_queued, name, "sequences", f"max_queued={quota.max_queued}")
            text = f"This key has {queued} requests in the queue, at most {quota.max_queued} are allowed (max_queued)."
            self._refuse(tenant, "tenant_queued", text, self._queue_seconds(self._begun_requests, self.num_requests))

    def _check_room(self, tenant: Tenant, num_requests: int, num_tokens: int, name: str) -> None:
        for bound, amount, what, option, begun, name_of_it in (
            (self._requests, num_requests, "requests", "max_num_queued_requests", self._begun_requests, name),
            (self._tokens, num_tokens, "tokens", "max_num_queued_tokens", self._begun_tokens, "prompt"),
        ):
            if bound.has_room(tenant.name, amount):
                continue
            most = bound.most_for(tenant.name)
            used = bound.used_by(tenant.name)
            limit = f"{option}={bound.most}"
            if most < bound.most:
                limit += f", of which {bound.most - most} are kept for other keys"
            _check_possible(amount, most, name_of_it, what, limit)
            if used + amount > most < bound.most:
                text = f"This key has {used} {what} in the queue, {amount} more would be too many ({limit})."
            else:
                text = f"The queue is full: {bound.num_used} {what} wait, {amount} more would be too many ({option})."
            self._refuse(tenant, f"queued_{what}", text, self._queue_seconds(begun, bound.num_used))

    def _queue_seconds(self, begun: Throughput, amount: float) -> int:
        """Until what waits now has begun, at the present pace. Where nothing has begun yet, as long again."""
        # the others are about as fast
        rate = self._ledger.num_processes * begun.rate(self._clock())
        seconds = amount / rate if rate else 2 * self.oldest_seconds
        return max(1, min(math.ceil(seconds), math.ceil(self.queue_seconds)))

    def _refuse(self, tenant: Tenant, why: str, text: str, seconds: float) -> NoReturn:
        self.use_of(tenant).num_rejected += 1
        self._rejections.add(1, why)
        raise rate_limited(f"{text} {_ADVICE}", max(1, math.ceil(seconds)))


def _check_possible(amount: int, most: int, name: str, what: str, limit: str) -> None:
    """What could never be accepted is a mistake of the request in the field `name`, and no matter of time."""
    if amount > most:
        raise RequestError(
            f"{name}: the request asks for {amount} {what} at once, more than one key may have on this server even "
            f"when nobody else has any ({limit}). Send it in several parts.",
            param=name,
        )
