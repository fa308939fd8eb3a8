"""The application of Ray Serve: a front, and a deployment of copies, which Serve starts anew when they are lost and,
where it may, more or fewer of as requests come."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.errors import OptionError
from quire.interfaces.deploy.front import Front, Head, Request
from quire.interfaces.deploy.roster import ROSTER
from quire.interfaces.deploy.route_options import MOST_BYTES_IN_FLIGHT
from quire.interfaces.deploy.served_copy import ServedCopy
from quire.interfaces.server.options import ServerOptions

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

_NAME = "quire"
# How many requests a copy or the front may have: they wait in the server of a copy, where the engine sees them.
_MOST_ONGOING = 100_000
_HEALTH_PERIOD = 2.0
_HEALTH_TIMEOUT = 10.0
_SHUTDOWN_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_ROUTER = "quire.interfaces.deploy.addressed_router:AddressedRouter"


class CopyDeployment:
    """A copy, as Serve keeps it."""

    def __init__(self, engine_options: dict[str, Any], server_options: dict[str, Any]) -> None:
        self._copy = ServedCopy(engine_options, server_options)
        self._has_begun = False

    async def check_health(self) -> None:
        """Serve starts another one where this raises, and sends nothing before it has returned once."""
        if not self._has_begun:
            await self._copy.wait_ready()
            self._has_begun = True
        if self._copy.has_ended:
            raise RuntimeError("the server of this copy has ended")

    async def is_ready(self) -> bool:
        return await self._copy.is_ready()

    async def answer(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> AsyncIterator[tuple[int, list[tuple[str, str]]] | bytes]:
        async for part in self._copy.answer(Request(method, target, headers, body)):
            yield (part.status, part.headers) if isinstance(part, Head) else part

    def __del__(self) -> None:
        self._copy.close()


class RemoteCopy:
    """A copy, as the front reaches it: by its name (addressed_router.py)."""

    def __init__(self, copies: Any, name: str) -> None:
        self._ready = copies.options(session_id=name).is_ready
        self._answer = copies.options(session_id=name, stream=True).answer

    async def is_ready(self) -> bool:
        return bool(await self._ready.remote())

    async def answer(self, request: Request) -> AsyncIterator[Head | bytes]:
        async for part in self._answer.remote(request.method, request.target, request.headers, request.body):
            yield Head(*part) if isinstance(part, tuple) else part


class FrontDeployment:
    """The front, as Serve calls it."""

    def __init__(self, policy: str, most_body_bytes: int, copies: Any) -> None:
        self._front = Front(partial(RemoteCopy, copies), policy)
        # loaded where HTTP is served
        from quire.interfaces.deploy.answering import BodyRoom

        self._room = BodyRoom(MOST_BYTES_IN_FLIGHT, most_body_bytes)
        self._copies = copies
        self._has_begun = False

    async def check_health(self) -> None:
        """Serve asks before it sends requests. It tells this process of copies from the first call to one on."""
        if not self._has_begun:
            loop = asyncio.get_running_loop()

            def follow(names: frozenset[str]) -> None:
                loop.call_soon_threadsafe(self._front.copies_are, names)

            ROSTER.follow(follow)
            await self._copies.is_ready.remote()
            self._has_begun = True

    def num_serving(self) -> int:
        return self._front.num_serving

    async def __call__(self, request: HttpRequest) -> Response:
        from quire.interfaces.deploy.answering import answer

        return await answer(self._front, request, self._room)


@dataclass(frozen=True)
class Scale:
    """How many copies there are: always as many, or as many as requests want."""

    least: int = 1
    # None: never more
    most: int | None = None
    # in flight, a copy
    target_ongoing_requests: float = 16.0
    # how long they must have been more, or fewer
    upscale_delay: float = 30.0
    downscale_delay: float = 600.0

    def __str__(self) -> str:
        return f"{self.least} copies" if self.most is None else f"{self.least} to {self.most} copies"

    def as_options(self) -> dict[str, Any]:
        """In Ray Serve's words."""
        if self.most is None:
            return {"num_replicas": self.least}
        scaling = {
            "min_replicas": self.least,
            "max_replicas": self.most,
            "target_ongoing_requests": self.target_ongoing_requests,
            "upscale_delay_s": self.upscale_delay,
            "downscale_delay_s": self.downscale_delay,
        }
        return {"autoscaling_config": scaling}


def run_deployment(
    engine_options: dict[str, Any],
    server_options: dict[str, Any],
    *,
    host: str,
    port: int,
    scale: Scale,
    num_cpus: float,
    policy: str,
) -> int:
    """Serves until a signal comes."""
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise OptionError("deploy: Ray is not installed. pip install 'quire[ray]', on every machine.") from error
    # a cluster that runs, or one of this machine alone
    is_joined = "RAY_ADDRESS" in os.environ or os.path.exists("/tmp/ray/ray_current_cluster")
    ray.init(
        address="auto" if is_joined else "local",
        include_dashboard=None if is_joined else False,
        log_to_driver=True,
        logging_level=logging.WARNING,
    )
    try:
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
        application = application_of(serve, engine_options, server_options, scale, num_cpus, policy)
        front = serve.run(application, name=_NAME, route_prefix="/", blocking=False)
        # Serve tells the front of a copy a little later than it says so here
        while front.num_serving.remote().result() < scale.least:
            time.sleep(_LOOK_SECONDS)
        print(f"Quire serves {scale} on http://{host}:{port}/v1", flush=True)
        _wait_for_signal()
        serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def application_of(
    serve: Any,
    engine_options: dict[str, Any],
    server_options: dict[str, Any],
    scale: Scale,
    num_cpus: float,
    policy: str,
) -> Any:
    copies = serve.deployment(CopyDeployment).options(
        name="copies",
        max_ongoing_requests=_MOST_ONGOING,
        # one that is no longer needed ends what it has begun
        graceful_shutdown_timeout_s=server_options.get("shutdown_timeout", ServerOptions.shutdown_timeout),
        health_check_period_s=_HEALTH_PERIOD,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        ray_actor_options={"num_cpus": num_cpus},
        request_router_config={"request_router_class": _ROUTER},
        **scale.as_options(),
    )
    front = serve.deployment(FrontDeployment).options(
        name="front",
        max_ongoing_requests=_MOST_ONGOING,
        graceful_shutdown_timeout_s=_SHUTDOWN_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    most_body_bytes = server_options.get("max_body_bytes", ServerOptions.max_body_bytes)
    return front.bind(policy, most_body_bytes, copies.bind(engine_options, server_options))


def _wait_for_signal() -> None:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
