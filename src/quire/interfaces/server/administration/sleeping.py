"""/sleep, /wake_up and /is_sleeping, with vLLM's names: weights and KV cache leave memory, and the server stays.

The engine's process ends and gives everything back to the system. What the server has to tell the next one (pinned
prefixes, adapters, sessions) stays here, as when an engine has died.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import Meta
from starlette.datastructures import State

from quire.errors import QuireError
from quire.interfaces.server.access.caller import admins_only
from quire.interfaces.server.openai.responses import only
from quire.interfaces.server.process_role import Alone
from quire.interfaces.server.serving import Serving
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import ApiError, invalid, unavailable
from quire.interfaces.server.wire.json_answer import json_answer

router = APIRouter(dependencies=[Depends(admins_only)])
_ABORT, _WAIT = "abort", "wait"
_LOOK_SECONDS = 0.02
# as metrics call requests that an administrator has ended
_KIND = "administrator"


class Asleep(msgspec.Struct, kw_only=True):
    """POST /sleep: the memory is free."""

    status: Annotated[str, only("sleeping")] = "sleeping"
    level: int


class Awake(msgspec.Struct, kw_only=True):
    """POST /wake_up: requests are answered."""

    status: Annotated[str, only("awake")] = "awake"
    tags: Annotated[list[str] | None, Meta(description="as they were asked for; weights and cache come together")]


class IsSleeping(msgspec.Struct, kw_only=True):
    """GET /is_sleeping."""

    is_sleeping: bool


@router.post("/sleep", openapi_extra=described(answer=Asleep))
async def sleep(
    request: Request,
    level: Annotated[int, Query(description="1, or 2: other weights will follow")] = 1,
    mode: Annotated[str, Query(description="abort: what runs is ended with an error; wait: until it ends")] = _ABORT,
) -> Response:
    """Weights and KV cache leave memory. Requests are refused with 503 from now on."""
    state = request.app.state
    _check(state, level, mode)
    serving: Serving = state.serving
    if not serving.is_asleep:
        serving.fall_asleep()
        try:
            async with asyncio.timeout(state.max_request_seconds):
                while mode == _WAIT and serving.engine.num_open_requests:
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            pass  # what runs longer than a request may is ended
        except asyncio.CancelledError:
            if serving.is_asleep:
                serving.attach(serving.engine)
            raise
        if not serving.is_asleep:
            raise ApiError(
                409, "It was woken up, or begins to end, before what ran had ended. Ask again.", code="not_asleep"
            )
        state.in_flight.interrupt_all(unavailable("The request was ended: the engine was put to sleep."), _KIND)
        await serving.engine.sleep()
    return json_answer(Asleep(level=level))


@router.post("/wake_up", openapi_extra=described(answer=Awake))
async def wake_up(
    request: Request, tags: Annotated[list[str] | None, Query(description="all comes back, whatever they name")] = None
) -> Response:
    """The engine starts again from the model's files; what was pinned and loaded is there again."""
    serving: Serving = request.app.state.serving
    if serving.is_asleep:
        try:
            await serving.engine.wake_up()
        except (QuireError, OSError) as error:
            raise unavailable(f"It does not wake up: {error} Free what it needs, and ask again.") from error
        # it may have begun to end meanwhile
        if serving.is_asleep:
            serving.attach(serving.engine)
    return json_answer(Awake(tags=tags))


@router.get("/is_sleeping", openapi_extra=described(answer=IsSleeping))
async def is_sleeping(request: Request) -> Response:
    """Whether it sleeps."""
    return json_answer(IsSleeping(is_sleeping=request.app.state.serving.is_asleep))


def _check(state: State, level: int, mode: str) -> None:
    serving: Serving = state.serving
    if level not in (1, 2):
        raise invalid(f"level={level}: must be 1 or 2; an engine that only pauses would free nothing.", "level")
    if mode not in (_ABORT, _WAIT):
        raise invalid(f"mode={mode[:40]!r}: must be {_ABORT} or {_WAIT}; nothing that runs can be kept.", "mode")
    if not isinstance(state.siblings, Alone):
        raise ApiError(
            409, "A server of several processes (api_server_count) cannot sleep. Serve with one.", code="not_alone"
        )
    if not serving.is_asleep:
        serving.check_ready()
        if level == 1 and serving.engine.weights_version:
            raise ApiError(
                409,
                "level=1: the weights of the model's files come back, and update_weights has changed them. Ask for "
                "level=2, and update them again after /wake_up.",
                param="level",
                code="other_weights",
            )
