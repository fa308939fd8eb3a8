"""What the server needs of an engine: `AsyncLLM` has it, and so have the fakes of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.interfaces.assembly import OutputDelta
from quire.messages import EngineReady
from quire.renderer import Renderer
from quire.sampling_params import SamplingParams


class ServedEngine(Protocol):
    """Tokens in, differences out as they come. Closing the iterator of `stream` aborts its request."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def renderer(self) -> Renderer: ...

    @property
    def ready(self) -> EngineReady: ...

    @property
    def dead_reason(self) -> str | None: ...

    async def prepare(
        self, prompt: list[int], sampling_params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Any:
        """Checks a request without starting it; raises RequestError. The result is given to `stream`."""

    def stream(self, prompt: Any) -> AsyncIterator[OutputDelta]: ...

    async def statistics(self) -> dict[str, float]: ...
