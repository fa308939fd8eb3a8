"""What a request waits for before it stands in line: KV that is fetched, an adapter that is loaded.

Each kind is an object with the same questions, so that Scheduler and Lifecycle know none of them. A request is asked
about by one kind after the other; while it waits for one of them, it stands in no line and in nobody's way. A kind
holds what it needs to know of a request, and writes none of its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from quire.engine_core.request import Request, Status
from quire.engine_core.step_observer import StepObserver
from quire.messages import EngineRequest


class Prerequisite(StepObserver):
    """The questions, with the answers of a kind that nobody waits for: a kind overrides what concerns it."""

    def meant_by(self, message: EngineRequest) -> EngineRequest:
        """The request as it is to be understood: what it names may have been replaced meanwhile."""
        return message

    def content_of(self, message: EngineRequest) -> bytes:
        """What names its blocks beside its tokens, where the message does not say it all."""
        return b""

    def reason_to_refuse(self, request: Request) -> str | None:
        """Why this request can never run, even alone."""
        return None

    def ask(self, request: Request) -> bool:
        """It has arrived; whether it waits. `arrived` then says when no more."""
        return False

    def arrived(self) -> Iterable[tuple[Request, str | None]]:
        """Those that wait no longer, and why they cannot go on, if they cannot."""
        return ()

    def wait(self) -> bool:
        """Nothing else is to be done: until something arrives, or a few milliseconds. False: nobody waits."""
        return False

    def ended(self, request: Request) -> None:
        """It needs nothing any more."""

    def operations(self) -> dict[str, Callable[..., Any]]:
        """What whoever manages the engine may call, by name."""
        return {}

    def check_invariants(self) -> None:
        """Raises if it contradicts itself."""


class Prerequisites(Prerequisite):
    """All kinds as one, asked in this order; each question goes to those alone who override it."""

    def __init__(self, kinds: Sequence[Prerequisite]) -> None:
        self.kinds = tuple(kinds)
        self._meant_by = [kind.meant_by for kind in kinds if type(kind).meant_by is not Prerequisite.meant_by]
        self._content_of = [kind.content_of for kind in kinds if type(kind).content_of is not Prerequisite.content_of]
        self._ended = [kind.ended for kind in kinds if type(kind).ended is not Prerequisite.ended]
        # those that somebody may wait for
        self._awaited = [kind for kind in kinds if type(kind).ask is not Prerequisite.ask]

    def meant_by(self, message: EngineRequest) -> EngineRequest:
        for meant_by in self._meant_by:
            message = meant_by(message)
        return message

    def content_of(self, message: EngineRequest) -> bytes:
        return b"".join([content_of(message) for content_of in self._content_of])

    def reason_to_refuse(self, request: Request) -> str | None:
        for kind in self.kinds:
            reason = kind.reason_to_refuse(request)
            if reason is not None:
                return reason
        return None

    def ask(self, request: Request) -> bool:
        return self._ask_from(0, request)

    def arrived(self) -> Iterator[tuple[Request, str | None]]:
        """Lazily: what is done with one may end the next."""
        for number, kind in enumerate(self._awaited, start=1):
            for request, refusal in kind.arrived():
                if request.status is not Status.WAITING:
                    continue
                if refusal is not None or not self._ask_from(number, request):
                    yield request, refusal

    def _ask_from(self, number: int, request: Request) -> bool:
        return any(kind.ask(request) for kind in self._awaited[number:])

    def wait(self) -> bool:
        return any(kind.wait() for kind in self._awaited)

    def ended(self, request: Request) -> None:
        for ended in self._ended:
            ended(request)

    def operations(self) -> dict[str, Callable[..., Any]]:
        return {name: call for kind in self.kinds for name, call in kind.operations().items()}

    def check_invariants(self) -> None:
        for kind in self.kinds:
            kind.check_invariants()
