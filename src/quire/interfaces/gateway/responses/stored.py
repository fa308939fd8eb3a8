"""Responses that are kept: a table of the server's storage. A conversation is a chain of them, each with its own items;
what is asked for again moves to the end of the line of what is deleted."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from quire.interfaces.gateway.storage.storage import Storage, mine, owned_table
from quire.interfaces.server.openai_responses.items import MAX_ITEMS, Item
from quire.interfaces.server.wire.errors import ApiError, invalid

UNFINISHED = ("queued", "in_progress")
# So long after its last beat the server that made one in the background is taken for gone.
BEAT_SECONDS_LOST = 60.0

RESPONSES = owned_table(
    "responses",
    sa.Column("previous_id", sa.String(128)),
    # of the response; of one in the background it changes, and then the server that makes it says when it last did
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("beat", sa.Float, nullable=False),
    sa.Column("is_unwanted", sa.Boolean, nullable=False),
    # both as JSON: the response as its client gets it, and the items of its own input
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("items", sa.LargeBinary, nullable=False),
)


class StoredResponses:
    """Of one tenant."""

    keeps = True

    def __init__(self, storage: Storage, tenant: str) -> None:
        self._storage = storage
        self._tenant = tenant

    async def add(self, response: dict[str, Any], items: list[Item]) -> None:
        """Kept when this returns."""
        body = msgspec.json.encode(response)
        encoded = msgspec.json.encode(items)
        now = self._storage.clock()
        row = {
            "id": response["id"],
            "tenant": self._tenant,
            "created": now,
            "used": now,
            "num_bytes": len(body) + len(encoded),
            "previous_id": response["previous_response_id"],
            "status": response["status"],
            "beat": now,
            "is_unwanted": False,
            "body": body,
            "items": encoded,
        }
        await self._storage.run(
            lambda connection: connection.execute(RESPONSES.insert().values(row)), adds_bytes=row["num_bytes"]
        )

    async def body(self, response_id: str) -> bytes:
        """JSON, as it was sent. Raises 404."""

        def work(connection: sa.Connection) -> bytes:
            row = self._row(connection, response_id, not_found)
            if self._is_lost(row):
                return self._write(connection, _failed(msgspec.json.decode(row.body)))
            return bytes(row.body)

        return await self._storage.run(work)

    async def update(self, response: dict[str, Any]) -> None:
        """A response in the background goes on, or ends. If it was deleted meanwhile, nothing happens."""
        # about: what the row had before is counted already
        adds_bytes = len(msgspec.json.encode(response["output"]))
        await self._storage.run(lambda connection: self._write(connection, response), adds_bytes=adds_bytes)

    async def ask_to_cancel(self, response_id: str) -> None:
        """Whoever makes it hears of this with the next beat."""
        one = mine(RESPONSES, self._tenant, response_id)
        query = RESPONSES.update().where(one).values(is_unwanted=True)
        await self._storage.run(lambda connection: connection.execute(query))

    async def beat(self, response_ids: list[str]) -> list[str]:
        """These are being made; returns those that nobody wants any more. For the server itself, so of all tenants."""

        def work(connection: sa.Connection) -> list[str]:
            now = self._storage.clock()
            these = RESPONSES.c.id.in_(response_ids)
            connection.execute(RESPONSES.update().where(these).values(beat=now, used=now))
            unwanted = sa.select(RESPONSES.c.id).where(these, RESPONSES.c.is_unwanted)
            return list(connection.execute(unwanted).scalars())

        return await self._storage.run(work)

    async def conversation(self, response_id: str) -> list[Item]:
        """All items up to and with its output. Raises 400: somebody follows a response that is not there."""

        def work(connection: sa.Connection) -> list[Item]:
            rows = self._chain(connection, response_id)
            if rows[-1].status in UNFINISHED:
                raise not_finished(response_id, rows[-1].status)
            ids = [row.id for row in rows]
            is_used = sa.and_(RESPONSES.c.tenant == self._tenant, RESPONSES.c.id.in_(ids))
            connection.execute(RESPONSES.update().where(is_used).values(used=self._storage.clock()))
            return [item for row in rows for item in (*_items(row), *msgspec.json.decode(row.body)["output"])]

        return await self._storage.run(work)

    async def input_items(self, response_id: str) -> list[Item]:
        """What it was made of: the conversation before it, and its own input. Raises 404."""

        def work(connection: sa.Connection) -> list[Item]:
            row = self._row(connection, response_id, not_found)
            before = self._chain(connection, row.previous_id) if row.previous_id else []
            past = [item for one in before for item in (*_items(one), *msgspec.json.decode(one.body)["output"])]
            return [*past, *_items(row)]

        return await self._storage.run(work)

    async def delete(self, response_id: str) -> None:
        """Raises 404. Responses that follow it cannot be continued any more."""

        def work(connection: sa.Connection) -> None:
            self._row(connection, response_id, not_found)
            connection.execute(RESPONSES.delete().where(mine(RESPONSES, self._tenant, response_id)))

        await self._storage.run(work, erases=True)

    # ------------------------------------------------------------------------------------------ in a transaction

    def _chain(self, connection: sa.Connection, last_id: str) -> list[Any]:
        """From the first response to this one."""
        rows: list[Any] = []
        next_id: str | None = last_id
        while next_id:
            row = self._row(connection, next_id, previous_not_found)
            rows.append(row)
            next_id = row.previous_id
            if len(rows) > MAX_ITEMS:
                # each has an item at least, so no template would take them
                raise previous_not_found(next_id)
        return rows[::-1]

    def _write(self, connection: sa.Connection, response: dict[str, Any]) -> bytes:
        body = msgspec.json.encode(response)
        num_bytes = len(body) + sa.func.length(RESPONSES.c["items"])
        values = {"body": body, "num_bytes": num_bytes, "status": response["status"], "beat": self._storage.clock()}
        connection.execute(RESPONSES.update().where(mine(RESPONSES, self._tenant, response["id"])).values(values))
        return body

    def _is_lost(self, row: Any) -> bool:
        """The server that made it is gone."""
        return row.status in UNFINISHED and self._storage.clock() - row.beat > BEAT_SECONDS_LOST

    def _row(self, connection: sa.Connection, response_id: str, missing: Any) -> Any:
        query = sa.select(RESPONSES).where(mine(RESPONSES, self._tenant, response_id))
        row = connection.execute(query).first()
        if row is None:
            raise missing(response_id)
        return row


def _items(row: Any) -> list[Item]:
    items: list[Item] = msgspec.json.decode(row.items)
    return items


def _failed(response: dict[str, Any]) -> dict[str, Any]:
    text = "The server was stopped while it made this response."
    return {**response, "status": "failed", "error": {"code": "server_error", "message": text}}


def not_finished(response_id: str, status: str) -> ApiError:
    text = f"previous_response_id={response_id[:80]!r}: this response is {status}. Wait until it is completed."
    return invalid(text, "previous_response_id")


def not_found(response_id: str) -> ApiError:
    text = f"Response with id {response_id[:80]!r} not found: it was never stored, is too old, or was deleted."
    return ApiError(404, text, param="response_id", code="response_not_found")


def previous_not_found(response_id: str | None) -> ApiError:
    text = (
        f"Previous response with id {str(response_id)[:80]!r} not found: it was not stored, is too old, or was deleted."
    )
    return ApiError(400, text, param="previous_response_id", code="previous_response_not_found")
