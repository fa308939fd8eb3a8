"""Who may come in, and as whom. Denies by default: what is not public needs a key wherever there are keys.

    Authorization: Bearer KEY, or x-api-key: KEY        one of them, once

Ordinary keys name tenants. The administrator's key opens everything. Endpoints of the administrator ask for a visit
with `is_admin` (`admins_only`); a server without any keys gives it to visitors on the machine itself, who could do
everything anyway, but not to a page in their browser that pretends to be there, nor to what a proxy passes on.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

from quire.interfaces.gateway.access.api_keys import KeyRing, hash_of
from quire.interfaces.gateway.access.tenants import NOBODY, Tenant
from quire.interfaces.server.access.caller import Header
from quire.interfaces.server.wire.errors import ApiError

_CHALLENGE = {"www-authenticate": "Bearer"}
# what proxies say of the one who asked them; that this one is here as well, nobody knows
_PASSED_ON = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
_LOCAL_HOST = re.compile(rb"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who a request comes from."""

    tenant: Tenant = NOBODY
    is_admin: bool = False


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
        return self._admin_digest is not None if self._is_for_admins else bool(len(self._keys))

    def visitor(self, headers: Iterable[Header], *, is_public: bool) -> Visitor:
        """Raises 401 for a key that is missing or wrong, where one is needed."""
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
        return Visitor(is_admin=is_open and _is_local(headers))

    def _found(self, given: list[bytes]) -> Visitor | None:
        """Whose key it is; two of them are nobody's."""
        if len(given) != 1:
            return None
        (key,) = given
        # both are compared in any case, so the time tells nothing
        is_admin = self._admin_digest is not None and hmac.compare_digest(hash_of(key), self._admin_digest)
        tenant = None if self._is_for_admins else self._keys.tenant_of(key)
        if is_admin:
            return Visitor(is_admin=True)
        return None if tenant is None else Visitor(tenant)


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
