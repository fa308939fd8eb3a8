"""Addresses to listen on, where listening on all networks would be a mistake."""

from __future__ import annotations

import ipaddress
import socket


def is_of_all_networks(host: str) -> bool:
    """In any of the spellings that the system takes, such as 0, 0x0, 0.0.0.0%lo and ::ffff:0.0.0.0."""
    bare = host.strip("[]").partition("%")[0]
    if bare == "*":
        return True
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        try:
            return not any(socket.inet_aton(bare))
        except OSError:
            return False  # a name
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified
