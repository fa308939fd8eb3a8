"""The end of a server is a list of steps, none of which is left out because an earlier one failed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger("quire.server")


async def end_each(**steps: Callable[[], Awaitable[object]]) -> None:
    """One after the other. `steps` by what they end, as the log is to call it."""
    for name, step in steps.items():
        try:
            await step()
        except Exception:
            logger.exception("%s: its end failed; the end of the server goes on", name.replace("_", " "))
