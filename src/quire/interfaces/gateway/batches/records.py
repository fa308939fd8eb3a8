"""What is kept of batches, in the storage: the object of the API and what is behind it, as JSON."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import sqlalchemy as sa

from quire.interfaces.gateway.batches.batch import Batch, BatchRecord
from quire.interfaces.gateway.storage.storage import Storage, is_row_id, mine, owned_table, page_of
from quire.interfaces.server.wire.paging import Page

logger = logging.getLogger("quire.server")

BATCHES = owned_table(
    "batches",
    sa.Column("is_open", sa.Boolean, nullable=False),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    expires=False,
)
# A batch that has ended is forgotten after so long. Its files stay.
_KEPT_SECONDS = 30 * 24 * 3600
_DECODER = msgspec.json.Decoder(BatchRecord)


class BatchRecords:
    """Rows of batches."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def now(self) -> int:
        return int(self._storage.clock())

    async def check(self) -> None:
        await self._storage.check()

    async def insert(self, record: BatchRecord, most_open: int) -> bool:
        """False if the tenant has so many open ones already."""
        now = self._storage.clock()
        values = {**_values(record), "id": record.batch.id, "tenant": record.tenant, "created": now, "used": now}
        size = len(str(values["document"]))

        def work(connection: sa.Connection) -> bool:
            old = sa.and_(BATCHES.c.is_open.is_(False), BATCHES.c.used < now - _KEPT_SECONDS)
            connection.execute(BATCHES.delete().where(old))
            count = sa.select(sa.func.count()).select_from(BATCHES)
            open_ones = count.where(BATCHES.c.tenant == record.tenant, BATCHES.c.is_open.is_(True))
            if connection.execute(open_ones).scalar_one() >= most_open:
                return False
            connection.execute(BATCHES.insert().values(**values))
            return True

        return await self._storage.run(work, adds_bytes=size)

    async def update(self, record: BatchRecord) -> None:
        values = {**_values(record), "used": self._storage.clock()}
        query = BATCHES.update().where(mine(BATCHES, record.tenant, record.batch.id)).values(**values)
        await self._storage.run(lambda connection: connection.execute(query).rowcount)

    async def find(self, batch_id: str, tenant: str) -> Batch | None:
        query = sa.select(BATCHES.c.document).where(mine(BATCHES, tenant, batch_id))
        document = await self._storage.run(lambda connection: connection.execute(query).scalar())
        return None if document is None else _DECODER.decode(document).batch

    async def page(self, tenant: str, page: Page) -> tuple[list[Batch], bool]:
        which = [BATCHES.c.tenant == tenant]
        rows, has_more = await self._storage.run(lambda connection: page_of(connection, BATCHES, which, page))
        return [record.batch for record in map(_readable, rows) if record is not None], has_more

    async def open_ones(self) -> tuple[list[BatchRecord], bool]:
        """Of all tenants, oldest first; and whether all rows could be read."""
        query = sa.select(BATCHES).where(BATCHES.c.is_open.is_(True)).order_by(BATCHES.c.created)
        rows = await self._storage.run(lambda connection: connection.execute(query).all())
        records = [record for record in map(_readable, rows) if record is not None]
        return records, len(records) == len(rows)

    async def reader_of(self, file_id: str, tenant: str) -> str | None:
        """An open batch that reads this file."""
        if not is_row_id(file_id):
            return None
        query = sa.select(BATCHES.c.id).where(
            BATCHES.c.tenant == tenant, BATCHES.c.is_open.is_(True), BATCHES.c.input_file_id == file_id
        )
        return await self._storage.run(lambda connection: connection.execute(query).scalar())


def _readable(row: Any) -> BatchRecord | None:
    """None for a row that is broken: it is left as it is, and takes nothing from the others."""
    try:
        return _DECODER.decode(row.document)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.error("batch %s cannot be read from the storage: %s", row.id, error)
        return None


def _values(record: BatchRecord) -> dict[str, object]:
    document = msgspec.json.encode(record).decode()
    return {
        "is_open": not record.batch.has_ended,
        "input_file_id": record.batch.input_file_id,
        "document": document,
        "num_bytes": len(document),
    }
