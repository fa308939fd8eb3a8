"""`quire route`: the front of servers that have a half of each request, as a process of its own. It has no model."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import OptionError
from quire.interfaces.deploy.answering import AnyFront, BodyRoom, answer
from quire.interfaces.deploy.front import Front
from quire.interfaces.deploy.http_copy import HttpCopy
from quire.interfaces.deploy.route_options import RouteOptions
from quire.interfaces.deploy.split_front import SplitFront
from quire.interfaces.gateway.access.access import Access
from quire.interfaces.gateway.access.api_keys import key_ring
from quire.interfaces.gateway.access.doors import is_loopback
from quire.interfaces.server.access.caller import PUBLIC_PATHS
from quire.interfaces.server.http_server import listener_copies, uvicorn_of
from quire.interfaces.server.life.process import loop_factory
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.transport.connections import connections_of
from quire.interfaces.server.transport.listener import host_of, listen, url_of
from quire.interfaces.server.transport.slow_readers import SlowReaders
from quire.interfaces.server.transport.unfinished import Descriptors, Unfinished
from quire.interfaces.server.wire.errors import ApiError

_METHODS = ["GET", "POST", "DELETE"]
logger = logging.getLogger("quire.deploy")


def run_route(
    prefill: Sequence[str], decode: Sequence[str], options: RouteOptions, *, host: str, port: int, policy: str
) -> int:
    """Serves until a signal comes."""
    for url in (*prefill, *decode):
        _check(url)
    access = Access(key_ring(options.api_keys, options.api_key_file))
    with listen(host, port) as listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        if not access.needs_key and not is_loopback(host_of(listener)):
            logger.warning("host=%s: whoever reaches this machine may use the models. Keys: --api-key.", host)
        return runner.run(_run(prefill, decode, policy, access, options, listener))


def _check(url: str) -> None:
    parts = urlsplit(url)
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address or parts.path not in ("", "/") or parts.query or parts.username:
        raise OptionError(f"{url}: must be the address of a server, such as http://10.0.0.1:8000.")


def front_app(front: AnyFront, access: Access, room: BodyRoom) -> Starlette:
    """The front behind keys, which are looked at before a body is read."""

    async def respond(request: Request) -> Response:
        path = request.scope["path"]
        try:
            tenant, _ = access.who_calls(request.headers.raw, is_public=path in PUBLIC_PATHS)
        except ApiError as error:
            return error.response(path)
        return await answer(front, request, room, tenant.name)

    return Starlette(routes=[Route("/{path:path}", respond, methods=_METHODS)])


async def _run(
    prefill: Sequence[str],
    decode: Sequence[str],
    policy: str,
    access: Access,
    options: RouteOptions,
    listener: socket.socket,
) -> int:
    of_server = ServerOptions()
    async with _split_front(prefill, decode, policy, options.prefill_timeout) as front:
        app = front_app(front, access, BodyRoom(options.max_bytes_in_flight))
        bounds = Unfinished(of_server.max_unfinished_connections, (), Descriptors()), SlowReaders()
        server = uvicorn_of(app, of_server, connections_of(of_server.first_byte_seconds, *bounds))
        loop = asyncio.get_running_loop()

        def end() -> None:
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        print(f"Quire serves both halves of requests at {url_of(listener)}/v1 (Ctrl-C ends it)", flush=True)
        await server.serve(sockets=listener_copies(listener))
    return 0


@asynccontextmanager
async def _split_front(
    prefill: Sequence[str], decode: Sequence[str], policy: str, prefill_seconds: float
) -> AsyncIterator[SplitFront]:
    copies = {url: HttpCopy(url) for url in (*prefill, *decode)}
    first = Front(copies.__getitem__, policy, kind="prefill server", part_seconds=prefill_seconds)
    first.copies_are(prefill)
    second = Front(copies.__getitem__, policy, kind="decode server")
    second.copies_are(decode)
    try:
        yield SplitFront(first, second)
    finally:
        for copy in copies.values():
            await copy.aclose()
