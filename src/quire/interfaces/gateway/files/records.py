"""What is known of each file, in the storage. Every query asks for the tenant: a file of somebody else is not there."""

from __future__ import annotations

import sqlalchemy as sa

from quire.interfaces.gateway.files.answers import FileObject
from quire.interfaces.gateway.storage.storage import Storage, is_row_id, mine, owned_table, page_of
from quire.interfaces.server.wire.paging import Page

FILES = owned_table(
    "files",
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=True),
    expires=False,
)


class FileRecords:
    """Rows of files. A file whose time is over is not there any more, whether or not it was removed."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def now(self) -> float:
        return self._storage.clock()

    async def check(self) -> None:
        await self._storage.check()

    async def insert(self, file: FileObject, tenant: str, now: float, *, quota: int | None) -> bool:
        """False if the tenant's files would be larger than `quota` together. A row that is there stays as it is."""

        def work(connection: sa.Connection) -> bool:
            if connection.execute(sa.select(FILES.c.id).where(mine(FILES, tenant, file.id))).first():
                return True
            if quota is not None and _sum_of(connection, tenant) + file.bytes > quota:
                return False
            values = {"filename": file.filename, "purpose": file.purpose, "expires_at": file.expires_at}
            connection.execute(
                FILES.insert().values(id=file.id, tenant=tenant, created=now, used=now, num_bytes=file.bytes, **values)
            )
            return True

        return await self._storage.run(work)

    async def num_bytes(self, tenant: str) -> int:
        return await self._storage.run(lambda connection: _sum_of(connection, tenant))

    async def find(self, file_id: str, tenant: str) -> FileObject | None:
        query = sa.select(FILES).where(mine(FILES, tenant, file_id), self._is_there())
        row = await self._storage.run(lambda connection: connection.execute(query).first())
        return None if row is None else _file(row)

    async def page(self, tenant: str, purpose: str | None, page: Page) -> tuple[list[FileObject], bool]:
        """Files in the order of their creation, and whether there are more."""
        which = [FILES.c.tenant == tenant, self._is_there()]
        if purpose is not None:
            # one that cannot be is not asked for
            if not is_row_id(purpose):
                return [], False
            which.append(FILES.c.purpose == purpose)
        rows, has_more = await self._storage.run(lambda connection: page_of(connection, FILES, which, page))
        return [_file(row) for row in rows], has_more

    async def delete(self, file_id: str, tenant: str) -> bool:
        query = FILES.delete().where(mine(FILES, tenant, file_id), self._is_there())
        return bool(await self._storage.run(lambda connection: connection.execute(query).rowcount))

    async def take_expired(self) -> list[str]:
        """Ids whose time is over; their rows are gone."""
        over = FILES.c.expires_at <= self.now

        def work(connection: sa.Connection) -> list[str]:
            ids = list(connection.execute(sa.select(FILES.c.id).where(over)).scalars())
            if ids:
                connection.execute(FILES.delete().where(over))
            return ids

        return await self._storage.run(work)

    async def all_ids(self) -> set[str]:
        """Of all tenants: what may lie in the folder."""
        return await self._storage.run(lambda connection: set(connection.execute(sa.select(FILES.c.id)).scalars()))

    def _is_there(self) -> sa.ColumnElement[bool]:
        return sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > self.now)


def _sum_of(connection: sa.Connection, tenant: str) -> int:
    query = sa.select(sa.func.coalesce(sa.func.sum(FILES.c.num_bytes), 0)).where(FILES.c.tenant == tenant)
    return int(connection.execute(query).scalar_one())


def _file(row: sa.Row[tuple[object, ...]]) -> FileObject:
    return FileObject(
        id=row.id,
        bytes=row.num_bytes,
        created_at=int(row.created),
        expires_at=row.expires_at,
        filename=row.filename,
        purpose=row.purpose,
    )
