"""The recording of a core under test, read as a client reads it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from quire.interfaces.engine_calls import EngineCalls
from quire.interfaces.recording import read_recording
from quire.observability.recorded import Recording
from quire.testing.core import CoreUnderTest


def recording_of(core: CoreUnderTest) -> Recording:
    return asyncio.run(read_recording(cast(EngineCalls, _Calls(core))))


class _Calls:
    """Of an engine without a client."""

    def __init__(self, core: CoreUnderTest) -> None:
        self._core = core

    async def control(self, name: str, args: dict[str, Any] | None = None) -> Any:
        return self._core.core.control(name, args or {})
