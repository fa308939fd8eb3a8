"""Tenants: who shares a server, and what each may use of it.

A tenant is named by the key that its requests bear; several keys may name the same one. Without keys there is one, who
has no name. Where there are several, each has a part of the prefix cache of its own: the engine mixes `cache_scope`
into the names of its blocks, a code that follows from the server's secret and the tenant's name and that no request can
choose. The operator's own prefixes (pinned ones) have none, so all tenants find them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire.messages import Tenancy

ANONYMOUS = ""
_SCOPE_LENGTH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What a tenant may use; None means no limit of its own."""

    # relative share of the engine's tokens, while several tenants want some
    weight: float = 1.0
    # sequences in flight: those that wait and those that run
    max_requests: int | None = None
    # of them, those that wait
    max_queued: int | None = None
    # prompts and outputs together, averaged; so many at once
    tokens_per_minute: int | None = None
    # the most important `priority` that a request may ask for
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A name and a quota. Equal names are the same tenant."""

    name: str = ANONYMOUS
    quota: Quota = Quota()


NOBODY = Tenant()


class Tenants:
    """All tenants of a server, by name; fixed when it starts."""

    def __init__(
        self, tenants: Iterable[Tenant] = (), *, secret: str | None = None, share_prefix_cache: bool = False
    ) -> None:
        self.by_name: Mapping[str, Tenant] = {one.name: one for one in tenants} or {ANONYMOUS: NOBODY}
        self.are_several = len(self.by_name) > 1
        self._secret = secret.encode() if secret else secrets.token_bytes(32)
        self._shares_cache = share_prefix_cache
        self._tenancies = {name: self._tenancy_of(tenant) for name, tenant in self.by_name.items()}

    def named(self, name: str) -> Tenant:
        """One whose key is gone has its name still, and no quota."""
        return self.by_name.get(name) or Tenant(name)

    def tenancy(self, tenant: Tenant) -> Tenancy | None:
        """What the engine is told where there are several; None: of nobody in particular."""
        if tenant.name == ANONYMOUS:
            return None
        return self._tenancies.get(tenant.name) or self._tenancy_of(tenant)

    def _tenancy_of(self, tenant: Tenant) -> Tenancy:
        code = hmac.new(self._secret, tenant.name.encode(), hashlib.sha256).hexdigest()[:_SCOPE_LENGTH]
        scope = "" if self._shares_cache else code
        return Tenancy(name=tenant.name, weight=tenant.quota.weight, cache_scope=scope)
