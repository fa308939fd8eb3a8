"""What LLM and AsyncLLM do alike in more than one call to the engine, written once: as a generator of steps.

A generator yields what is to be done (a request to compute, a management operation) and is sent the result; what it
returns at last is the result of the whole. It never waits itself, so the same one serves a blocking and an asynchronous
caller: `perform` and `perform_async` are all that differs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
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


Step: TypeAlias = Control | Compute
Steps: TypeAlias = Generator[Step, Any, _T]


def control(name: str, **args: Any) -> Steps[Any]:
    """A management operation whose refusal is a mistake of whoever asked for it."""
    try:
        return (yield Control(name, args))
    except EngineDeadError:
        raise
    except EngineError as error:
        raise RequestError(str(error)) from error


def perform(steps: Steps[_T], do: Callable[[Step], Any]) -> _T:
    """Carries the steps out one after the other; a step's error is raised at its place in the generator."""
    try:
        step = next(steps)
        while True:
            try:
                result = do(step)
            except QuireError as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        done: _T = end.value
        return done
    finally:
        # after Ctrl-C: what the generator holds is given up
        steps.close()


async def perform_async(steps: Steps[_T], do: Callable[[Step], Awaitable[Any]]) -> _T:
    """The same for an event loop."""
    try:
        step = next(steps)
        while True:
            try:
                result = await do(step)
            except QuireError as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        done: _T = end.value
        return done
    finally:
        steps.close()
