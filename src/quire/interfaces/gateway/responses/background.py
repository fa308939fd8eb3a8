"""Responses that are made while nobody waits: started by one request, looked at, awaited and cancelled by others.

Owns the tasks that make them. What became of one is always written down: a response that is not finished and whose
server has not said for BEAT_SECONDS_LOST that it still works at it has failed, whoever looks. So the end of a process,
even a violent one, leaves nothing that seems to go on for ever, and several servers may share a database.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.engine_client import each_of, news_of
from quire.interfaces.gateway.responses.stored import StoredResponses
from quire.interfaces.gateway.storage.storage import Storage
from quire.interfaces.server.access.in_flight import InFlight, Ticket
from quire.interfaces.server.openai_responses.answer import ResponseAnswer
from quire.interfaces.server.wire.errors import ApiError, api_error_of, invalid, unavailable

logger = logging.getLogger("quire.server")

BEAT_SECONDS = 5.0
_STOP_SECONDS = 2.0


class _CancelledByClientError(Exception):
    """The client said so."""


@dataclass(slots=True)
class _Running:
    answer: ResponseAnswer
    task: asyncio.Task[None] | None = None
    ticket: Ticket | None = None

    def interrupt(self, cause: Exception, kind: str) -> None:
        if self.ticket is not None:
            self.ticket.interrupt(cause, kind)


class BackgroundResponses:
    """Those of one server."""

    def __init__(self, in_flight: InFlight, storage: Storage) -> None:
        self._in_flight = in_flight
        self._storage = storage
        self._running: dict[str, _Running] = {}
        self._heart: asyncio.Task[None] | None = None

    async def start(self, answer: ResponseAnswer) -> dict[str, Any]:
        """The response as it is now: queued. Raises 429 if there is no room, 503 if it cannot be kept."""
        response = answer.response
        answer.work.accepted()
        try:
            response["status"] = "queued"
            await answer.stored.add(response, answer.items)
        except BaseException:
            answer.work.give_up()
            raise
        running = self._running[response["id"]] = _Running(answer)
        running.task = asyncio.create_task(self._make(running))
        if self._heart is None or self._heart.done():
            self._heart = asyncio.create_task(self._beat())
        return response

    async def cancel(self, response_id: str, tenant: str) -> bytes:
        """The response after that, as JSON. Raises 404, and 400 for one that was made while its client waited."""
        stored = StoredResponses(self._storage, tenant)
        found = msgspec.json.decode(await stored.body(response_id))
        if not found["background"]:
            raise invalid("A response that was not made in the background cannot be cancelled: it is over.",
                          "response_id")  # fmt: skip
        running = self._running.get(response_id)
        if running is None:
            # of another server, which sees it with its next beat; or over, and nobody sees it
            await stored.ask_to_cancel(response_id)
        else:
            running.interrupt(_CancelledByClientError(), "cancelled")
            assert running.task is not None
            await asyncio.wait({running.task})
        return await stored.body(response_id)

    def drop(self, response_id: str) -> None:
        """It was deleted."""
        if running := self._running.get(response_id):
            running.interrupt(_CancelledByClientError(), "cancelled")

    async def stop(self) -> None:
        """Those that run have failed, and it is written down; a storage that hangs is not waited for."""
        running = list(self._running.values())
        for one in running:
            one.interrupt(unavailable("The server was stopped while it made this response."), "shutdown")
        if tasks := [one.task for one in running if one.task is not None]:
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        if self._heart is not None:
            self._heart.cancel()

    # ------------------------------------------------------------------------------------------ in tasks

    async def _make(self, running: _Running) -> None:
        answer = running.answer
        try:
            try:
                with self._in_flight.enter() as running.ticket:
                    await _made(answer)
                return
            except _CancelledByClientError:
                answer.cancel()
            except Exception as error:
                answer.fail(api_error_of(error))
            await answer.stored.update(answer.response)
        except ApiError:
            # it fails by itself when its beats stay out; the log has the cause
            logger.warning("%s ended and this could not be stored", answer.response["id"])
        except Exception:
            logger.exception("%s ended and this could not be stored", answer.response["id"])
        finally:
            answer.work.give_up()
            del self._running[answer.response["id"]]

    async def _beat(self) -> None:
        """Says that these are still being made, and hears which are not wanted any more."""
        while self._running:
            await asyncio.sleep(BEAT_SECONDS)
            if not self._running:
                return
            stored = StoredResponses(self._storage, "")
            try:
                for response_id in await stored.beat(list(self._running)):
                    self.drop(response_id)
            except ApiError:
                logger.warning("the storage did not hear that %d responses are being made", len(self._running))
            except Exception:  # a heart that stopped would let all that are made here fail
                logger.exception("the storage did not take that %d responses are being made", len(self._running))


async def _made(answer: ResponseAnswer) -> None:
    """Whoever looks sees when it has begun."""
    async with answer.generating() as generation:
        await news_of(generation)
        # a failure that comes meanwhile takes nothing of what came before it
        news = generation.take()
        answer.response["status"] = "in_progress"
        await answer.stored.update(answer.response)
        for delta in news:
            answer.fold(delta)
        await each_of(generation, answer.fold)
    await answer.whole()
