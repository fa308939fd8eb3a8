"""The application of Ray Serve: a front, and a deployment for each copy, which Serve starts anew when it is lost."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from quire.errors import OptionError
from quire.interfaces.deploy.front import Front, Head, Request
from quire.interfaces.deploy.served_copy import ServedCopy

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

_NAME = "quire"
# How many requests a copy or the front may have: they wait in the server of a copy, where the engine sees them.
_MOST_ONGOING = 100_000
_HEALTH_PERIOD = 2.0
_HEALTH_TIMEOUT = 10.0
_SHUTDOWN_SECONDS = 5.0


class CopyDeployment:
    """A copy, as Serve keeps it."""

    def __init__(self, engine_options: dict[str, Any], server_options: dict[str, Any]) -> None:
        self._copy = ServedCopy(engine_options, server_options)
        self._has_begun = False

    async def check_health(self) -> None:
        """Serve starts another one where this raises."""
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
    """A copy, as the front reaches it."""

    def __init__(self, handle: Any) -> None:
        self._ready = handle.is_ready
        self._answer = handle.options(stream=True).answer

    async def is_ready(self) -> bool:
        return bool(await self._ready.remote())

    async def answer(self, request: Request) -> AsyncIterator[Head | bytes]:
        async for part in self._answer.remote(request.method, request.target, request.headers, request.body):
            yield Head(*part) if isinstance(part, tuple) else part


class FrontDeployment:
    """The front, as Serve calls it."""

    def __init__(self, policy: str, most_body_bytes: int, *handles: Any) -> None:
        self._front = Front([RemoteCopy(handle) for handle in handles], policy)
        self._most_body_bytes = most_body_bytes

    async def __call__(self, request: HttpRequest) -> Response:
        from starlette.responses import PlainTextResponse, StreamingResponse

        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._most_body_bytes:
                return PlainTextResponse(f"a body may have {self._most_body_bytes} bytes", 413)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        head, parts = await self._front.answer(Request(request.method, target, request.headers.items(), bytes(body)))
        return StreamingResponse(parts, head.status, dict(head.headers))


def run_deployment(
    engine_options: dict[str, Any],
    server_options: dict[str, Any],
    *,
    host: str,
    port: int,
    num_replicas: int,
    num_cpus: float,
    policy: str,
    most_body_bytes: int,
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
        serve.run(_application(serve, locals()), name=_NAME, route_prefix="/", blocking=False)
        print(f"Quire serves {num_replicas} copies on http://{host}:{port}/v1", flush=True)
        _wait_for_signal()
        serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def _application(serve: Any, told: dict[str, Any]) -> Any:
    common = {"max_ongoing_requests": _MOST_ONGOING, "graceful_shutdown_timeout_s": _SHUTDOWN_SECONDS}
    copies = [
        serve.deployment(CopyDeployment)
        .options(
            name=f"copy-{number}",
            num_replicas=1,
            health_check_period_s=_HEALTH_PERIOD,
            health_check_timeout_s=_HEALTH_TIMEOUT,
            ray_actor_options={"num_cpus": told["num_cpus"]},
            **common,
        )
        .bind(told["engine_options"], told["server_options"])
        for number in range(told["num_replicas"])
    ]
    front = serve.deployment(FrontDeployment).options(name="front", ray_actor_options={"num_cpus": 0}, **common)
    return front.bind(told["policy"], told["most_body_bytes"], *copies)


def _wait_for_signal() -> None:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
