"""Who may come in, and as whom. Denies by default: what is not public needs a key wherever there are keys.

    Authorization: Bearer KEY, or x-api-key: KEY        one of them, once

Ordinary keys name tenants. The administrator's key opens everything. Endpoints of the administrator ask for a caller
with `is_admin` (`admins_only`); a server without any keys takes for one who calls from the machine itself, and could do
everything anyway, but not a page in a browser that pretends to be there, nor what a proxy passes on.

The server hears of a tenant through the protocols of `server/access/caller.py`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

from quire.interfaces.gateway.access.api_keys import KeyRing, hash_of
from quire.interfaces.gateway.access.tenants import NOBODY, Tenant, Tenants
from quire.interfaces.gateway.access.waiting_room import WaitingRoom
from quire.interfaces.server.access.caller import Caller, Header
from quire.interfaces.server.wire.errors import ApiError

_CHALLENGE = {"www-authenticate": "Bearer"}
# what proxies say of the one who asked them; that this one is here as well, nobody knows
_PASSED_ON = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
_LOCAL_HOST = re.compile(rb"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)


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
            tenancy=self.tenants.tenancy(tenant) if self.tenants.are_several else None,
            admission=self.room,
            tenant=tenant,
            is_admin=is_admin,
            is_alone=not self.tenants.are_several,
            request_id=request_id,
            is_patient=is_patient,
        )


class Access:
    """The keys of one port."""

    def __init__(
        self,
        keys: KeyRing | None = None,
        *,
        admin_key: str | None = None,
        is_open_to_admins: bool = False,
        is_for_admins: bool = False,
    ) -> None:
        """`is_open_to_admins`: no key is needed to administrate from this machine. `is_for_admins`: a port for nothing
        else, so that ordinary keys open nothing here."""
        self._keys = keys or KeyRing()
        self._admin_digest = hash_of(admin_key.encode()) if admin_key is not None else None
        self._is_open_to_admins = is_open_to_admins
        self._is_for_admins = is_for_admins

    @property
    def needs_key(self) -> bool:
        """Of everybody."""
        return self._admin_digest is not None if self._is_for_admins else bool(self._keys.keys)

    def who_calls(self, headers: Iterable[Header], *, is_public: bool) -> tuple[Tenant, bool]:
        """The tenant, and whether it is the administrator. Raises 401 for a key that is missing or wrong, where one is
        needed."""
        headers = list(headers)
        given = _keys_in(headers)
        found = self._found(given)
        if found is not None:
            return found
        if self.needs_key and not is_public:
            if not given:
                raise ApiError(401, "No API key: send the header Authorization: Bearer KEY.", headers=_CHALLENGE)
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=_CHALLENGE)
        is_open = self._is_open_to_admins or (self._is_for_admins and not self.needs_key)
        return NOBODY, is_open and _is_local(headers)

    def _found(self, given: list[bytes]) -> tuple[Tenant, bool] | None:
        """Whose key it is; two of them are nobody's."""
        if len(given) != 1:
            return None
        (key,) = given
        # both are compared in any case, so the time tells nothing
        is_admin = self._admin_digest is not None and hmac.compare_digest(hash_of(key), self._admin_digest)
        tenant = None if self._is_for_admins else self._keys.tenant_of(key)
        if is_admin:
            return NOBODY, True
        return None if tenant is None else (tenant, False)


@dataclass(frozen=True, slots=True)
class KeyedDoor:
    """The door of one port: a key tells who calls."""

    access: Access
    callers: Callers

    @property
    def needs_key(self) -> bool:
        return self.access.needs_key

    def caller(self, headers: Iterable[Header], request_id: str, *, is_public: bool) -> Caller:
        tenant, is_admin = self.access.who_calls(headers, is_public=is_public)
        return self.callers.of(tenant, request_id, is_admin=is_admin)


def _keys_in(headers: list[Header]) -> list[bytes]:
    """The keys that a request gives: OpenAI's clients write one into Authorization, Anthropic's into X-Api-Key. What is
    no key is empty; one that is given both ways counts once."""
    bearers = [value.partition(b" ") for name, value in headers if name == b"authorization"]
    keys = [key if scheme.lower() == b"bearer" else b"" for scheme, _, key in bearers]
    others = [value for name, value in headers if name == b"x-api-key"]
    return others if keys == others else [*keys, *others]


def _is_local(headers: list[Header]) -> bool:
    """A page elsewhere can make a browser come here under its own name (DNS rebinding), but not under this one."""
    if any(name in _PASSED_ON for name, _ in headers):
        return False
    hosts = [value for name, value in headers if name == b"host"]
    return len(hosts) == 1 and _LOCAL_HOST.fullmatch(hosts[0]) is not None
