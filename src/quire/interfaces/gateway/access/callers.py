"""What the server is told of who calls: a tenant, seen through the protocols of `server/access/caller.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.interfaces.gateway.access.access import Access
from quire.interfaces.gateway.access.tenants import Tenant, Tenants
from quire.interfaces.gateway.access.waiting_room import WaitingRoom
from quire.interfaces.server.access.caller import Caller, Header


@dataclass(frozen=True, slots=True)
class Callers:
    """Makes callers of visitors and of tenants. Owns nothing."""

    tenants: Tenants
    room: WaitingRoom

    def patient(self, name: str, request_id: str = "") -> Caller:
        """For work on behalf of a tenant that no request stands behind any more."""
        return self.of(self.tenants.named(name), request_id, is_patient=True)

    def of(self, tenant: Tenant, request_id: str, *, is_admin: bool = False, is_patient: bool = False) -> Caller:
        return Caller(
            name=tenant.name,
            tenancy=self.tenants.tenancy(tenant),
            admission=self.room,
            tenant=tenant,
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
        visitor = self.access.visitor(headers, is_public=is_public)
        return self.callers.of(visitor.tenant, request_id, is_admin=visitor.is_admin)
