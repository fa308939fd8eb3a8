"""A page of a table's rows, by the time of their creation. Called by the families that keep rows, in a transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from quire.interfaces.gateway.storage.storage import is_row_id
from quire.interfaces.server.wire.paging import Page, no_such_entry


def page_of(
    connection: sa.Connection, table: sa.Table, which: Sequence[sa.ColumnElement[bool]], page: Page
) -> tuple[Sequence[Any], bool]:
    """Rows by their time, and whether there are more. Raises ApiError for an `after` that is not among them."""
    key = sa.tuple_(table.c.created, table.c.id)
    query = sa.select(table).where(*which)
    if page.after is not None:
        here = _place_of(connection, table, which, page.after)
        query = query.where(key > here if page.order == "asc" else key < here)
    order = (table.c.created, table.c.id)
    query = query.order_by(*(order if page.order == "asc" else [column.desc() for column in order]))
    rows = connection.execute(query.limit(page.limit + 1)).all()
    return rows[: page.limit], len(rows) > page.limit


def _place_of(
    connection: sa.Connection, table: sa.Table, which: Sequence[sa.ColumnElement[bool]], after: str
) -> sa.Tuple:
    if not is_row_id(after):
        raise no_such_entry(after)
    last = connection.execute(sa.select(table.c.created, table.c.id).where(*which, table.c.id == after)).first()
    if last is None:
        raise no_such_entry(after)
    return sa.tuple_(sa.literal(last.created), sa.literal(last.id))
