"""How long rows are kept: until nobody has used them for `max_age_seconds`, or until all together need more room than
`max_bytes`. Then the tenant that takes most gives first, its longest unused rows: nobody pushes out another's."""

from __future__ import annotations

import sqlalchemy as sa

_FRACTION_KEPT = 0.9
_ROWS_AT_ONCE = 200


class Retention:
    """Called with a connection in a transaction. Knows about how many bytes there are without asking each time."""

    def __init__(self, metadata: sa.MetaData, *, max_bytes: int, max_age_seconds: float) -> None:
        self._metadata = metadata
        self._max_bytes = max_bytes
        self._max_age = max_age_seconds
        self.num_bytes = 0

    def add(self, num_bytes: int) -> bool:
        """So many were written. True if there may be too many now."""
        self.num_bytes += num_bytes
        return self.num_bytes > self._max_bytes

    def sweep(self, connection: sa.Connection, now: float) -> int:
        """Deletes what is too old or too much; returns how many rows."""
        num_deleted = 0
        for table in self._tables():
            old = table.delete().where(table.c.used < now - self._max_age)
            num_deleted += connection.execute(old).rowcount
        by_tenant = self._bytes_by_tenant(connection)
        self.num_bytes = sum(by_tenant.values())
        if self.num_bytes > self._max_bytes:
            target = int(self._max_bytes * _FRACTION_KEPT)
            while self.num_bytes > target:
                num_shrunk = self._shrink(connection, by_tenant, self.num_bytes - target)
                if not num_shrunk:
                    # somebody else deletes from the same database
                    break
                num_deleted += num_shrunk
        return num_deleted

    def _shrink(self, connection: sa.Connection, by_tenant: dict[str, int], too_many: int) -> int:
        """Some of the longest unused rows of the tenant that has most."""
        tenant = max(by_tenant, key=lambda name: by_tenant[name])
        oldest = sa.union_all(
            *(
                sa.select(sa.literal(table.name).label("name"), table.c.id, table.c.num_bytes, table.c.used).where(
                    table.c.tenant == tenant
                )
                for table in self._tables()
            )
        ).subquery()
        num_deleted = 0
        for name, row_id, num_bytes, _ in connection.execute(
            sa.select(oldest).order_by(oldest.c.used).limit(_ROWS_AT_ONCE)
        ).all():
            table = self._metadata.tables[name]
            connection.execute(table.delete().where(table.c.id == row_id))
            num_deleted += 1
            too_many -= num_bytes
            by_tenant[tenant] -= num_bytes
            self.num_bytes -= num_bytes
            if too_many <= 0 or by_tenant[tenant] < max(by_tenant.values()):
                break
        return num_deleted

    def _bytes_by_tenant(self, connection: sa.Connection) -> dict[str, int]:
        found: dict[str, int] = {}
        for table in self._tables():
            query = sa.select(table.c.tenant, sa.func.sum(table.c.num_bytes)).group_by(table.c.tenant)
            for tenant, num_bytes in connection.execute(query):
                found[tenant] = found.get(tenant, 0) + int(num_bytes)
        return found

    def _tables(self) -> list[sa.Table]:
        return [table for table in self._metadata.sorted_tables if table.info.get("expires")]
