"""Responses that are kept: a table of the server's storage. A conversation is a chain of them, each with its own items;
what is asked for again moves to the end of the line of what is deleted."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from quire.interfaces.server.errors import ApiError
from quire.interfaces.server.openai_responses.items import MAX_ITEMS, Item
from quire.interfaces.server.storage import Storage, mine, owned_table

RESPONSES = owned_table(
    "responses",
    sa.Column("previous_id", sa.String(128)),
    # both as JSON: the response as its client gets it, and the items of its own input
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("items", sa.LargeBinary, nullable=False),
)


class StoredResponses:
    """Of one tenant."""

    def __init__(self, storage: Storage, tenant: str) -> None:
        self._storage = storage
        self._tenant = tenant

    async def add(self, response: dict[str, Any], items: list[Item]) -> None:
        """Kept when this returns."""
        body, encoded = msgspec.json.encode(response), msgspec.json.encode(items)
        now = self._storage.clock()
        row = {
            "id": response["id"],
            "tenant": self._tenant,
            "created": now,
            "used": now,
            "num_bytes": len(body) + len(encoded),
            "previous_id": response["previous_response_id"],
            "body": body,
            "items": encoded,
        }
        await self._storage.run(
            lambda connection: connection.execute(RESPONSES.insert().values(row)), adds_bytes=row["num_bytes"]
        )

    async def body(self, response_id: str) -> bytes:
        """JSON, as it was sent. Raises 404."""

        def work(connection: sa.Connection) -> bytes:
            return bytes(self._row(connection, response_id, not_found).body)

        return await self._storage.run(work)

    async def conversation(self, response_id: str) -> list[Item]:
        """All items up to and with its output. Raises 400: somebody follows a response that is not there."""

        def work(connection: sa.Connection) -> list[Item]:
            rows = self._chain(connection, response_id)
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
            done = connection.execute(RESPONSES.delete().where(mine(RESPONSES, self._tenant, response_id)))
            if not done.rowcount:
                raise not_found(response_id)

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

    def _row(self, connection: sa.Connection, response_id: str, missing: Any) -> Any:
        query = sa.select(RESPONSES).where(mine(RESPONSES, self._tenant, response_id))
        row = connection.execute(query).first()
        if row is None:
            raise missing(response_id)
        return row


def _items(row: Any) -> list[Item]:
    items: list[Item] = msgspec.json.decode(row.items)
    return items


def not_found(response_id: str) -> ApiError:
    text = f"Response with id {response_id[:80]!r} not found: it was never stored, is too old, or was deleted."
    return ApiError(404, text, param="response_id", code="response_not_found")


def previous_not_found(response_id: str | None) -> ApiError:
    text = (
        f"Previous response with id {str(response_id)[:80]!r} not found: it was not stored, is too old, or was deleted."
    )
    return ApiError(400, text, param="previous_response_id", code="previous_response_not_found")
