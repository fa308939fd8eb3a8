"""GET /metrics, in Prometheus' text format."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from fastapi import APIRouter, Depends, Request, Response
from starlette.datastructures import State

from quire.errors import EngineDeadError, QuireError
from quire.interfaces.server.access.caller import overseers_only
from quire.interfaces.server.serving import Readiness, Serving
from quire.interfaces.server.wire.api_description import described
from quire.observability.metrics import CONTENT_TYPE

logger = logging.getLogger("quire.server")
router = APIRouter(dependencies=[Depends(overseers_only)])
# An engine in a long step answers late; then its numbers are left out, and the front end's are shown.
_ENGINE_SECONDS = 2.0


@router.get("/metrics", openapi_extra=described(media_type="text/plain", errors=(403,)))
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms."""
    state = request.app.state
    statistics, others = await asyncio.gather(_statistics(state), state.siblings.ask("metrics"))
    statistics = added(statistics, [other["statistics"] for other in others])
    content = state.metrics.exposition(statistics, [other["instruments"] for other in others])
    return Response(content, headers={"content-type": CONTENT_TYPE})


async def _statistics(state: State) -> dict[str, float]:
    serving: Serving = state.serving
    own = _beside_the_engine(state)
    if serving.readiness is not Readiness.READY:
        return own
    try:
        async with asyncio.timeout(_ENGINE_SECONDS):
            return {**own, **await serving.engine.statistics()}
    except (TimeoutError, QuireError) as error:
        logger.warning("the engine's statistics are missing from /metrics: %s", str(error) or "no answer in time")
        return own


def own_statistics(state: State) -> dict[str, float]:
    """What this process counts beside its instruments; the engine, which all share, is not asked."""
    serving: Serving = state.serving
    own = _beside_the_engine(state)
    # one that drains still has requests in the engine, and hands over what it has counted
    if not serving.has_started or serving.readiness not in (Readiness.READY, Readiness.STOPPING):
        return own
    try:
        return {**own, **serving.engine.client_statistics()}
    except EngineDeadError:
        return own


def _beside_the_engine(state: State) -> dict[str, float]:
    traces = state.tracing.statistics() if state.tracing is not None else {}
    return {**traces, **state.services.statistics()}


def added(one: Mapping[str, float], others: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Numbers by name, summed."""
    total = dict(one)
    for other in others:
        for name, value in other.items():
            total[name] = total.get(name, 0.0) + value
    return total
