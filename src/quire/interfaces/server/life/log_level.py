"""The least level that is logged, by this process and by its engine, which hears of a change when it is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from quire.errors import EngineDeadError

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AsyncLLM

_LOGGER = logging.getLogger("quire")


class LogLevelOfEngine:
    """Owned by the server's state. Nobody waits for the engine: one that is in a long step hears of it later."""

    def __init__(self) -> None:
        self._has_changed = False
        self._telling: set[asyncio.Task[None]] = set()

    def change(self, level: str, engine: AsyncLLM | None) -> None:
        """`engine`: the one that serves now. Any other one is told when it serves."""
        _LOGGER.setLevel(level)
        self._has_changed = True
        if engine is not None:
            self.engine_serves(engine)

    def engine_serves(self, engine: AsyncLLM) -> None:
        """It took the level of whoever started it, when that began."""
        if self._has_changed:
            self._begin(_tell(engine))

    def _begin(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


async def _tell(engine: AsyncLLM) -> None:
    # another one takes its place, and begins with the level of this process
    with suppress(EngineDeadError):
        await engine.control("set_log_level", {"level": _LOGGER.level})
