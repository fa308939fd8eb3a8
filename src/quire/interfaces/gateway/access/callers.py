"""What the server is told of who calls: a tenant, seen through the protocols of `server/access/caller.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.interfaces.gateway.access.access import Access, Visitor
from quire.interfaces.gateway.access.tenants import Tenant, Tenants
from quire.interfaces.gateway.access.waiting_room import WaitingRoom
from quire.interfaces.server.access.caller import Caller, Header, Reservation, Size
from quire.interfaces.server.wire.errors import ApiError


@dataclass(frozen=True, slots=True)
class TenantAdmission:
    """The bounds of one tenant in the waiting room that all share."""

    tenant: Tenant
    tenants: Tenants
    room: WaitingRoom

    @property
    def queue_seconds(self) -> float:
        return self.room.queue_seconds

    @property
    def request_seconds(self) -> float:
        return self.room.request_seconds

    @property
    def max_sequences(self) -> int | None:
        quota = self.tenant.quota
        bounds = (self.room.max_requests, quota.max_requests, quota.max_queued)
        return min(bound for bound in bounds if bound is not None)

    def check(self, num_sequences: int, num_tokens: int = 0, *, num_prompts: int = 1) -> None:
        self.room.check(self.tenant, num_sequences, num_tokens, num_prompts=num_prompts)

    def check_priority(self, priority: int) -> None:
        self.tenants.check_priority(self.tenant, priority)

    def admit(self, sizes: Sequence[Size], *, is_arriving: bool = False) -> Reservation:
        return self.room.admit(self.tenant, sizes, is_arriving=is_arriving)

    def waited_too_long(self) -> ApiError:
        return self.room.waited_too_long()


@dataclass(frozen=True, slots=True)
class Callers:
    """Makes callers of visitors and of tenants. Owns nothing."""

    tenants: Tenants
    room: WaitingRoom

    def visiting(self, visitor: Visitor, request_id: str) -> Caller:
        return self._caller(visitor.tenant, request_id, is_admin=visitor.is_admin)

    def patient(self, name: str, request_id: str = "") -> Caller:
        """For work on behalf of a tenant that no request stands behind any more."""
        return self._caller(self.tenants.named(name), request_id, is_patient=True)

    def _caller(self, tenant: Tenant, request_id: str, *, is_admin: bool = False, is_patient: bool = False) -> Caller:
        return Caller(
            name=tenant.name,
            tenancy=self.tenants.tenancy(tenant),
            admission=TenantAdmission(tenant, self.tenants, self.room),
            is_admin=is_admin,
            is_alone=not self.tenants.are_several,
            request_id=request_id,
            is_patient=is_patient,
        )


@dataclass(frozen=True, slots=True)
class KeyedDoor:
    """The door of one port: a key tells who calls."""

    access: Access
    callers: Callers

    @property
    def needs_key(self) -> bool:
        return self.access.needs_key

    def caller(self, headers: Iterable[Header], request_id: str, *, is_public: bool) -> Caller:
        return self.callers.visiting(self.access.visitor(headers, is_public=is_public), request_id)
