"""Which door leads where: who may come in through the main port, and through that of the administrator.

a key for administrators                /v1/admin/* on the main port, with that key
a port for administrators               /v1/admin/* there and nowhere else; with the key, if there is one
neither, and no keys at all, and        /v1/admin/* on the main port, for those on the same machine: they could
only this machine can reach the port    stop the server as well
neither, otherwise                      /v1/admin/* do not exist
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from quire.errors import OptionError
from quire.interfaces.gateway.access.access import Access
from quire.interfaces.gateway.access.api_keys import key_ring
from quire.interfaces.gateway.access.tenants import Quota, Tenants
from quire.interfaces.server.options import ServerOptions


@dataclass(frozen=True, slots=True)
class Doors:
    """Made from the options once, when the server starts."""

    main: Access
    # None: there is no port for administrators
    admin: Access | None
    # the main port has the administrator's endpoints
    is_administrated_here: bool
    tenants: Tenants


def doors_of(options: ServerOptions, *, is_local: bool = False) -> Doors:
    """`is_local`: only this machine can reach the main port. Raises OptionError for what would be open to anybody."""
    quota = Quota(
        max_requests=options.tenant_max_requests,
        max_queued=options.tenant_max_queued_requests,
        tokens_per_minute=options.tenant_tokens_per_minute,
    )
    keys = key_ring(options.api_keys, options.api_key_file, quota)
    has_port = options.admin_port is not None
    has_key = options.admin_api_key is not None
    if has_key and keys.tenant_of(str(options.admin_api_key).encode()) is not None:
        raise OptionError("admin_api_key: it is an ordinary key as well. Choose another one for the administrator.")
    if not has_port and options.admin_host != ServerOptions.admin_host:
        raise OptionError(
            f"admin_host={options.admin_host}: this is the admin port's address, and there is no admin port. "
            "Give admin_port, or leave it out."
        )
    if has_port and not has_key and not is_loopback(options.admin_host):
        raise OptionError(
            f"admin_host={options.admin_host}: other machines reach it, so the admin port needs a key. Give "
            "admin_api_key, or leave the host at 127.0.0.1."
        )
    is_open = is_local and not (keys.keys or has_key or has_port)
    return Doors(
        main=Access(keys, admin_key=None if has_port else options.admin_api_key, is_open_to_admins=is_open),
        admin=Access(admin_key=options.admin_api_key, is_for_admins=True) if has_port else None,
        is_administrated_here=is_open or (has_key and not has_port),
        tenants=Tenants(keys.tenants, secret=options.tenant_secret, share_prefix_cache=options.share_prefix_cache),
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
