"""How late the event loop comes to what is due: the one number that says whether anything blocks it."""

from __future__ import annotations

import asyncio

from quire.observability.instruments import Histogram

_PERIOD_SECONDS = 0.1


async def measure_loop_lag(lag: Histogram) -> None:
    """For ever, ten times a second."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _PERIOD_SECONDS
        await asyncio.sleep(_PERIOD_SECONDS)
        lag.observe(max(0.0, loop.time() - due))
