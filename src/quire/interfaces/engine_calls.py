"""What prefixes, sessions, forms and recordings ask of an engine, and what they do when they are broken off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from quire.errors import EngineDeadError, EngineError, QuireError, RequestError
from quire.messages import EngineRequest
from quire.outputs import RequestOutput

_T = TypeVar("_T")


class EngineCalls(Protocol):
    """As much of an AsyncLLM as they need."""

    async def control(self, name: str, args: dict[str, Any] | None = None) -> Any:
        """A management operation of the core, and its result."""

    async def compute(self, request: EngineRequest) -> RequestOutput:
        """A checked request, run to its end. One that fails raises."""

    async def in_form_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """A function that may take long; forms are checked there."""


class OfReplica:
    """The same of one of several engines: management calls reach it alone."""

    def __init__(self, engine: EngineCalls, number: int) -> None:
        self._engine = engine
        self._prefix = f"replica.{number}."
        self.compute = engine.compute
        self.in_form_thread = engine.in_form_thread

    async def control(self, name: str, args: dict[str, Any] | None = None) -> Any:
        return await self._engine.control(self._prefix + name, args)


async def control(engine: EngineCalls, operation: str, /, **args: Any) -> Any:
    """A management operation whose refusal is a mistake of whoever asked for it."""
    try:
        return await engine.control(operation, args)
    except EngineDeadError:
        raise
    except EngineError as error:
        raise RequestError(str(error)) from error


async def release_if_kept(engine: EngineCalls, handle: str) -> None:
    """Nothing is kept there afterwards, also if whoever asks is cancelled meanwhile; a dead engine keeps nothing."""
    try:
        await outlast(control(engine, "release_kept", handle=handle))
    except QuireError:
        return


async def outlast(work: Coroutine[Any, Any, _T]) -> _T:
    """Does the work to its end, and is cancelled only then."""
    task = asyncio.ensure_future(work)
    cancellation = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        if not task.cancelled():
            task.exception()  # has been looked at; whoever waited for it is gone
        raise cancellation
    return task.result()
