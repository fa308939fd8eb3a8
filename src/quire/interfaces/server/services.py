"""What the server tells of its life to what stands beside its engine, and where it keeps responses.

A gateway has files, batches, sessions and a database there. The ones here keep nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

from quire.interfaces.server.wire.errors import invalid


class ResponseStore(Protocol):
    """Responses of one caller."""

    # whether what is added can be asked for
    keeps: bool

    async def add(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Kept when this returns."""

    async def update(self, response: dict[str, Any]) -> None:
        """A response in the background goes on, or ends."""

    async def conversation(self, response_id: str) -> list[dict[str, Any]]:
        """All items up to and with its output. Raises 400 if it is not there."""


class Services(Protocol):
    """What stands beside the engine, as the server sees it."""

    def resume(self) -> None:
        """Goes on with what an earlier server has left, once an engine serves. May be called again."""

    async def stop(self) -> None:
        """What runs is aborted, or left for the next start."""

    def close(self) -> None:
        """After the last answer. May block."""

    def statistics(self) -> dict[str, float]: ...

    async def responses_of(self, name: str) -> ResponseStore:
        """Of the caller of this name. Raises 503 where nothing can be kept now."""

    async def make_in_background(self, answer: Any) -> dict[str, Any]:
        """A response that is checked (a ResponseAnswer): as it is now, queued."""


class NothingIsKept:
    """A response is over when it was answered."""

    keeps = False

    async def add(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None: ...

    async def update(self, response: dict[str, Any]) -> None: ...

    async def conversation(self, response_id: str) -> list[dict[str, Any]]:
        raise invalid(
            "previous_response_id: this server keeps no responses. Send the whole conversation as input.",
            "previous_response_id",
        )


class NoServices:
    """There is the engine, and nothing else."""

    def resume(self) -> None: ...

    async def stop(self) -> None: ...

    def close(self) -> None: ...

    def statistics(self) -> dict[str, float]:
        return {}

    async def responses_of(self, name: str) -> ResponseStore:
        return NothingIsKept()

    async def make_in_background(self, answer: Any) -> dict[str, Any]:
        raise invalid("background: this server keeps no responses. Leave it out and wait for the answer.", "background")
