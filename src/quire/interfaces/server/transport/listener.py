"""The listening socket. It is opened before anything that takes time, so that a port in use is found at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from quire.errors import OptionError

_BACKLOG = 2048
# A peer that vanished without a word is noticed by being asked, or by data that it does not take. Linux counts a full
# window as such, so this is more than the clocks of answers and streams need, which know who is slow: 60 seconds,
# looked at every 15.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 80_000))


def listen(host: str, port: int, prefix: str = "") -> socket.socket:
    """A socket that listens already. Port 0 takes any free port. `prefix`: of its options, in what errors say."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OptionError(
            f"{prefix}host={host}: not an address of this machine ({error.strerror}). "
            "Use 127.0.0.1 for this machine only, or 0.0.0.0 for all its networks."
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        # Connections of an earlier server that are still closing do not matter; one that listens does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE:
            if hasattr(socket, name):
                # accepted connections inherit it
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OptionError(f"{prefix}{_explained(host, port, prefix, error)}") from None
    return listener


def _explained(host: str, port: int, prefix: str, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"port={port}: in use on {host} already. Stop the other program, or choose another port "
                f"(--{prefix.replace('_', '-')}port {port + 1 if port < 65535 else 8000}, or 0 for any free one)."
            )
        case errno.EACCES | errno.EPERM:
            return f"port={port}: not allowed for this user. Ports below 1024 belong to root; choose a higher one."
        case errno.EADDRNOTAVAIL:
            return f"host={host}: not an address of this machine. Use 127.0.0.1, or 0.0.0.0 for all its networks."
        case _:
            return f"host={host} port={port}: cannot listen there ({error.strerror})."


@contextlib.contextmanager
def listen_at(path: str) -> Iterator[socket.socket]:
    """A Unix socket that listens already. Its file goes with it; one that a dead server has left is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            _remove_left_over(path)
            listener.bind(path)
            listener.listen(_BACKLOG)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OptionError(
                f"uds={path}: cannot listen there ({reason}). Name a new file in a folder that is there."
            ) from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
    finally:
        listener.close()


def _remove_left_over(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
            raise OSError(errno.EADDRINUSE, "in use already")
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)


def host_of(listener: socket.socket) -> str:
    """What it listens on; "" for a Unix socket, behind which anybody may stand, such as a proxy."""
    return "" if listener.family == socket.AF_UNIX else str(listener.getsockname()[0])


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """An address that a client on this machine can use."""
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
