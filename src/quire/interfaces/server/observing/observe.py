"""/v1/observe/*: what the engine does at this moment and why, for the page at / and for whoever asks.

With an ordinary API key, as long as there is one tenant; what several do is for the administrator. Answers hold numbers
and reasons: no prompt, no answer, no token, no name of a user.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.server.access.caller import overseers_only
from quire.interfaces.server.observing.observe_answers import ObservedBlocks, ObservedDecisions, ObservedState, Trace
from quire.interfaces.server.observing.observed import Observed
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import ApiError

router = APIRouter(dependencies=[Depends(overseers_only)])
Since = Annotated[
    int, Query(ge=0, le=2**53, description="number of the first decision that is wanted: `next` of the last answer")
]


@router.get("/v1/observe/state", openapi_extra=described(answer=ObservedState, errors=(403,)))
async def state(request: Request) -> Response:
    """Throughput, latency, who runs, who waits and for what, and where the memory is."""
    return _answer(await _observed(request).state(_engine(request)))


@router.get("/v1/observe/blocks", openapi_extra=described(answer=ObservedBlocks, errors=(403,)))
async def blocks(request: Request) -> Response:
    """The block map: what each block holds and for whom, as columns of bytes in base64, and a sentence about it."""
    return _answer(await _observed(request).blocks(_engine(request)))


@router.get("/v1/observe/decisions", openapi_extra=described(answer=ObservedDecisions, errors=(403,)))
async def decisions(request: Request, since: Since = 0) -> Response:
    """The scheduler's last decisions, in words and as numbers, oldest first."""
    return _answer(await _observed(request).decisions(_engine(request), since))


@router.get("/v1/observe/trace", openapi_extra=described(answer=Trace, errors=(403, 409)))
async def trace(request: Request) -> Response:
    """The recording as a trace that ui.perfetto.dev opens."""
    _check_recorded(_engine(request))
    content = await _observed(request).trace(_engine(request))
    return _answer(content, {"content-disposition": 'attachment; filename="quire.trace.json"'})


def _observed(request: Request) -> Observed:
    """What all viewers of this server share."""
    observed: Observed = request.app.state.observed
    return observed


def _engine(request: Request) -> AsyncLLM:
    engine: AsyncLLM = request.app.state.serving.engine
    return engine


def _answer(content: bytes, headers: dict[str, Any] | None = None) -> Response:
    return Response(content, media_type="application/json", headers={"cache-control": "no-store", **(headers or {})})


def _check_recorded(engine: AsyncLLM) -> None:
    if not engine.config.recorder_bytes:
        text = "Nothing is recorded: the server was started with recorder_bytes=0. Start it with some memory for it."
        raise ApiError(409, text, code="not_recorded")
