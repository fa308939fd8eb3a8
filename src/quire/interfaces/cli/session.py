"""An engine for the time of one command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AsyncLLM


@asynccontextmanager
async def open_engine(options: dict[str, Any]) -> AsyncIterator[AsyncLLM]:
    """In a process of its own, as the server has it, unless typed otherwise: so Ctrl-C works while a model loads."""
    from quire.interfaces.async_llm import AsyncLLM

    async with AsyncLLM(**options) as engine:
        yield engine
