"""The engine as a request sees it that names an adapter: whatever it starts is computed with that adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.interfaces.adapters import Adapter

if TYPE_CHECKING:
    from quire.interfaces.server.engine import ServedEngine


class AdapterEngine:
    """All else goes to the engine itself."""

    def __init__(self, engine: ServedEngine, adapter: Adapter) -> None:
        self._engine = engine
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def prepare(self, prompt: Any, params: Any, **settings: Any) -> Any:
        return await self._engine.prepare(prompt, params, lora_request=self._adapter, **settings)

    async def embed(self, prompt: Any, params: Any, **settings: Any) -> Any:
        return await self._engine.embed(prompt, params, lora_request=self._adapter, **settings)

    async def receive(self, pieces: Any, params: Any, **settings: Any) -> Any:
        return await self._engine.receive(pieces, params, lora_request=self._adapter, **settings)
