"""GET /metrics, in Prometheus' text format."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, Depends, Request, Response

from quire.errors import QuireError
from quire.interfaces.gateway.access.access import overseers_only
from quire.interfaces.gateway.sibling_answers import added
from quire.interfaces.server.state import Readiness, ServerState, state_of
from quire.interfaces.server.wire.api_description import described
from quire.observability.metrics import CONTENT_TYPE

logger = logging.getLogger("quire.server")
router = APIRouter(dependencies=[Depends(overseers_only)])
# An engine in a long step answers late; then its numbers are left out, and the front end's are shown.
_ENGINE_SECONDS = 2.0


@router.get("/metrics", openapi_extra=described(media_type="text/plain", errors=(403,)))
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms."""
    state = state_of(request)
    statistics, others = await asyncio.gather(_statistics(state), state.role.siblings.ask("metrics"))
    statistics = added(statistics, [other["statistics"] for other in others])
    content = state.metrics.exposition(statistics, [other["instruments"] for other in others])
    return Response(content, headers={"content-type": CONTENT_TYPE})


async def _statistics(state: ServerState) -> dict[str, float]:
    own = {**state.tracing.statistics(), **state.storage_statistics()}
    if state.readiness is not Readiness.READY:
        return own
    try:
        async with asyncio.timeout(_ENGINE_SECONDS):
            return {**own, **await state.engine.statistics()}
    except (TimeoutError, QuireError) as error:
        logger.warning("the engine's statistics are missing from /metrics: %s", str(error) or "no answer in time")
        return own
