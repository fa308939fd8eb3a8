"""Connections that have not said yet what they want: heads that are not whole, WebSockets without a first message.

They cost a client nothing, and the server a descriptor each. Each has so long and no longer; one address holds only so
many, and the last descriptors of the process are for whoever comes next. Who has to go is never the new one, which may
be honest, but the oldest: an honest one has said what it wants long before. Where none is left, it is one that was
answered and is idle.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import ipaddress
import logging
import os
import resource
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from quire.errors import OptionError

logger = logging.getLogger("quire.server.access")

# Of those that this process may have. So many connections can be accepted before those that were closed for them have
# gone (16 in a turn of the event loop), and files are opened meanwhile.
_SPARE_DESCRIPTORS = 48
# what one host is given of IPv6
_IPV6_PREFIX = 64
_REMEMBERED_ADDRESSES = 4096

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Beginner(Protocol):
    """Such a connection."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    client: tuple[str, int] | None
    # it has so long
    head_seconds: float

    def give_up(self) -> bool:
        """Whether it is closed now. One that still answers an earlier request closes when it has."""

    def has_unread(self) -> bool:
        """Whether something has come that was not read yet: it may have said what it wants."""


class Descriptors:
    """How many connections this process has descriptors for, beside what else it has open."""

    def __init__(self, most: int | None = None, count: Callable[[], int] | None = None) -> None:
        """`most`: how many may be open, by default what the system allows but for a few; `count` says how many are."""
        self._most = most
        self._count = count or _num_open
        self._num_for_connections = 0
        self._num_until_count = 0

    def num_for(self, num_connections: int) -> int:
        """So many connections, if there are `num_connections` now. Asked once for each that is new."""
        if self._num_until_count == 0:
            num_open = self._count()
            most = _num_allowed() - _SPARE_DESCRIPTORS if self._most is None else self._most
            self._num_for_connections = most - (num_open - num_connections)
            # counting costs a look at each, so it is done the less often the more there are
            self._num_until_count = max(_SPARE_DESCRIPTORS // 3, num_open // 16)
        self._num_until_count -= 1
        return self._num_for_connections


class Unfinished:
    """Those of one process, from the oldest to the newest."""

    def __init__(
        self,
        most_per_address: int | None = None,
        proxies: Iterable[Network] = (),
        descriptors: Descriptors | None = None,
    ) -> None:
        """`proxies`: many clients share their addresses, so they are not bounded; nor is this machine. `descriptors`
        for all connections, finished ones too."""
        self._most_per_address = most_per_address
        self._counted_as = _names_of(tuple(proxies))
        self._descriptors = descriptors
        self._num_open = 0
        self._clocks: dict[Beginner, asyncio.TimerHandle] = {}
        self._by_address: dict[str, dict[Beginner, None]] = {}
        # those that were answered, and may ask again
        self._idle: dict[Beginner, None] = {}
        # those that were closed, and have their descriptors until the next turn
        self._leaving: set[Beginner] = set()
        self._num_displaced = 0

    def __len__(self) -> int:
        return len(self._clocks)

    def statistics(self) -> dict[str, int]:
        return {
            "unfinished": len(self._clocks),
            "addresses": len(self._by_address),
            "idle": len(self._idle),
            "displaced": self._num_displaced,
        }

    def arrive(self, connection: Beginner) -> None:
        """A new connection of this process, which begins."""
        self._num_open += 1
        self.begin(connection)
        if self._descriptors is not None:
            self._make_room(self._num_open - self._descriptors.num_for(self._num_open), connection)

    def _make_room(self, num_too_many: int, newest: Beginner) -> None:
        """For this one, and for one of those who stayed while nothing of them had been read yet."""
        takes_all = num_too_many > _SPARE_DESCRIPTORS // 2
        for _ in range(min(2, num_too_many - len(self._leaving))):
            self._displace_oldest_of(self._in_order(takes_all=takes_all), newest, "the last descriptors are for others")

    def _in_order(self, *, takes_all: bool) -> Iterator[Beginner]:
        """Who has to go first. What has come and was not read may be all that is missing, and is read in the next turn:
        until then some of the spare descriptors serve."""
        unread = []
        for connection in (*self._clocks, *self._idle):
            if connection.has_unread():
                unread.append(connection)
            else:
                yield connection
        if takes_all:
            yield from unread

    def leave(self, connection: Beginner) -> None:
        """It is gone."""
        self._num_open -= 1
        self._leaving.discard(connection)
        self.end(connection)

    def begin(self, connection: Beginner) -> None:
        """Its clock runs from now on, unless it does already."""
        self._idle.pop(connection, None)
        if connection in self._clocks:
            return
        self._clocks[connection] = connection.loop.call_later(connection.head_seconds, self._expire, connection)
        address = self._bounded_address(connection)
        if address is not None:
            of_address = self._by_address.setdefault(address, {})
            of_address[connection] = None
            if self._most_per_address is not None and len(of_address) > self._most_per_address:
                self._displace_oldest_of(list(of_address), connection, "one address has too many such connections")

    def rest(self, connection: Beginner) -> None:
        """It was answered, and may ask again. Only where there are no descriptors left it has to go."""
        if connection not in self._clocks:
            self._idle[connection] = None

    def end(self, connection: Beginner) -> None:
        """It has said what it wants."""
        self._idle.pop(connection, None)
        clock = self._clocks.pop(connection, None)
        if clock is None:
            return
        clock.cancel()
        address = self._bounded_address(connection)
        if address is not None:
            of_address = self._by_address[address]
            del of_address[connection]
            if not of_address:
                del self._by_address[address]

    def _expire(self, connection: Beginner) -> None:
        self.end(connection)
        connection.give_up()

    def _displace_oldest_of(self, connections: Iterable[Beginner], newest: Beginner, why: str) -> None:
        for connection in connections:
            if connection is newest:
                continue
            self.end(connection)
            self._leaving.add(connection)
            if connection.give_up():
                self._num_displaced += 1
                address = "{}:{}".format(*connection.client) if connection.client else "somebody"
                logger.info("%s asks for nothing and is closed: %s", address, why)
                return
            self._leaving.discard(connection)

    def _bounded_address(self, connection: Beginner) -> str | None:
        return None if connection.client is None else self._counted_as(connection.client[0])


def _names_of(proxies: Sequence[Network]) -> Callable[[str], str | None]:
    """What an address is counted as; None: it is not bounded. Asked several times a request, so it is remembered."""

    @functools.lru_cache(_REMEMBERED_ADDRESSES)
    def counted_as(text: str) -> str | None:
        address = ipaddress.ip_address(text.partition("%")[0])
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        address = mapped or address
        if address.is_loopback or any(address in network for network in proxies):
            return None
        if isinstance(address, ipaddress.IPv6Address):
            return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
        return str(address)

    return counted_as


def networks_of(addresses: Iterable[str]) -> list[Network]:
    """Raises OptionError for what is neither an address nor a network."""
    networks: list[Network] = []
    for address in addresses:
        try:
            networks.append(ipaddress.ip_network(address, strict=False))
        except ValueError:
            raise OptionError(
                f"proxy_addresses={address!r}: must be an IP address or a network, such as 10.0.0.7 or 10.0.0.0/8: "
                "names are not looked up. Give the address that the proxy connects from."
            ) from None
    return networks


def _num_allowed() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _num_open() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError as error:
        # none is left to look with; or there is nothing to look at, and nobody has to go for that
        return _num_allowed() if error.errno in (errno.EMFILE, errno.ENFILE) else 0


def num_unread(transport: asyncio.BaseTransport) -> int:
    """Bytes that the system has of a connection, and nobody else."""
    socket = transport.get_extra_info("socket")
    if socket is None or socket.fileno() < 0:
        return 0
    return int.from_bytes(fcntl.ioctl(socket.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
