"""What LLM and AsyncLLM do alike in more than one call to the engine, written once: as a generator of steps.

A generator yields what is to be done (a request to compute, a management operation) and is sent the result; what it
returns at last is the result of the whole. It never waits itself, so the same one serves a blocking and an asynchronous
caller: `perform` and `perform_async` are all that differs.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from quire.errors import EngineDeadError, EngineError, QuireError, RequestError
from quire.messages import EngineRequest

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Control:
    """A management operation of the core; its result is what the core answers."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compute:
    """A request that runs to its end; its result is the RequestOutput. One that fails raises."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Call:
    """A function that takes long without the engine, and leaves an event loop free meanwhile; its result is the
    function's."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


Step: TypeAlias = Control | Compute | Call
Steps: TypeAlias = Generator[Step, Any, _T]


def control(name: str, **args: Any) -> Steps[Any]:
    """A management operation whose refusal is a mistake of whoever asked for it."""
    try:
        return (yield Control(name, args))
    except EngineDeadError:
        raise
    except EngineError as error:
        raise RequestError(str(error)) from error


def release_if_kept(handle: str) -> Steps[None]:
    """Nothing is kept there afterwards; a dead engine keeps nothing."""
    try:
        yield from control("release_kept", handle=handle)
    except QuireError:
        return


def perform(steps: Steps[_T], do: Callable[[Step], Any]) -> _T:
    """Carries the steps out one after the other; a step's error is raised at its place in the generator, Ctrl-C too:
    what the generator does then to clean up is still carried out."""
    try:
        return _carry_out(steps, do, None)
    except BaseException as error:
        if inspect.getgeneratorstate(steps) != inspect.GEN_SUSPENDED:
            raise
        # Ctrl-C between two steps
        return _carry_out(steps, do, error)


def _carry_out(steps: Steps[_T], do: Callable[[Step], Any], error: BaseException | None) -> _T:
    try:
        step = next(steps) if error is None else steps.throw(error)
        while True:
            try:
                result = do(step)
            except BaseException as failure:
                step = steps.throw(failure)
            else:
                step = steps.send(result)
    except StopIteration as end:
        done: _T = end.value
        return done


async def perform_async(steps: Steps[_T], do: Callable[[Step], Awaitable[Any]]) -> _T:
    """The same for an event loop. What cleans up after a cancellation is not cancelled itself."""
    try:
        return await _carry_out_async(steps, do, next(steps))
    except StopIteration as end:
        done: _T = end.value
        return done
    finally:
        steps.close()


async def _carry_out_async(steps: Steps[_T], do: Callable[[Step], Awaitable[Any]], step: Step) -> _T:
    try:
        while True:
            try:
                result = await do(step)
            except asyncio.CancelledError as error:
                return await outlast(_carry_out_async(steps, do, steps.throw(error)))
            except QuireError as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        done: _T = end.value
        return done


async def outlast(work: Coroutine[Any, Any, _T]) -> _T:
    """Does the work to its end, and is cancelled only then."""
    task, cancellation = asyncio.ensure_future(work), None
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
