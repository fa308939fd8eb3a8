"""Channels between machines: ZeroMQ with a key for each rank (CURVE), as MessagePack.

The core listens on one address of its machine and knows the key of everybody who may connect; the keys were handed over
when the ranks were started. Who has none gets no further than the handshake, which libzmq does: nothing of what a
stranger sends is ever decoded here.
"""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec
import zmq
import zmq.auth.thread

from quire.config.network_addresses import is_of_all_networks
from quire.engine_core.executor.rank_channel import RankMessage, decode_message

_LONGEST_ANSWER = 64 * 2**20


class KeyedAddress(msgspec.Struct, kw_only=True):
    """Where to connect to, and by which keys."""

    endpoint: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes


class KeyedListener:
    """The core's side: a socket and a key for each of those who may connect."""

    def __init__(self, host_ip: str) -> None:
        self._address = ipaddress.ip_address(host_ip)
        assert not is_of_all_networks(host_ip), "it was checked when the options were"
        self._context = zmq.Context()
        self._public_key, self._secret_key = zmq.curve_keypair()
        # by the domain of a socket: who may connect to it
        self._guests: dict[str, bytes] = {}
        self._gate = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._gate.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """ZeroMQ's question whether a key may connect."""
        return self._guests.get(domain) == key

    def invite(self, kind: int) -> tuple[zmq.Socket[bytes], KeyedAddress]:
        """A socket of that kind, for those that have the address."""
        guest = f"guest{len(self._guests)}"
        public_key, secret_key = zmq.curve_keypair()
        self._guests[guest] = public_key
        self._gate.configure_curve_callback(guest, self)
        socket = self._bound(kind, guest)
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket, KeyedAddress(
            endpoint=endpoint, server_key=self._public_key, public_key=public_key, secret_key=secret_key
        )

    def close(self) -> None:
        self._gate.stop()
        self._context.destroy(linger=0)

    def _bound(self, kind: int, domain: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(0)
        # a stranger may announce any length before it has shown a key
        socket.maxmsgsize = _LONGEST_ANSWER
        socket.curve_server = True
        socket.curve_secretkey = self._secret_key
        socket.zap_domain = domain.encode()
        socket.ipv6 = self._address.version == 6
        host = f"[{self._address}]" if self._address.version == 6 else str(self._address)
        socket.bind(f"tcp://{host}:*")
        return socket


def connected(kind: int, address: KeyedAddress) -> zmq.Socket[bytes]:
    """The other side's socket."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(0)
    socket.curve_serverkey = address.server_key
    socket.curve_publickey = address.public_key
    socket.curve_secretkey = address.secret_key
    socket.ipv6 = "[" in address.endpoint
    socket.linger = 0
    socket.connect(address.endpoint)
    return socket


class KeyedChannel:
    """One end of the way between the core and a rank."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket

    def send(self, message: bytes) -> None:
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise OSError(f"nobody is there: {error}") from error

    def receive(self, seconds: float | None = None) -> RankMessage | None:
        """None: nothing came in time."""
        try:
            if not self._socket.poll(None if seconds is None else round(1000 * seconds)):
                return None
            return decode_message(self._socket.recv())
        except zmq.ZMQError as error:
            raise OSError(f"nobody is there: {error}") from error

    def close(self) -> None:
        self._socket.close(0)
