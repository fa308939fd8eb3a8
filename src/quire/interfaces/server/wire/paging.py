"""Lists that come in pages, as OpenAI's API has them: limit, order, and the id after which a page begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from fastapi import Query

from quire.interfaces.server.wire.errors import invalid

if TYPE_CHECKING:
    import sqlalchemy as sa


Order: TypeAlias = Literal["asc", "desc"]
After: TypeAlias = Annotated[str | None, Query(description="the last id of the page before")]
Sorted: TypeAlias = Annotated[Order, Query(description="by the time of creation")]


@dataclass(frozen=True, slots=True)
class Page:
    """What a client asked for."""

    limit: int
    after: str | None = None
    order: Order = "desc"


def limited(most: int) -> Any:
    """The parameter `limit`."""
    return Query(ge=1, le=most, description="entries of a page")


def page_of(
    connection: sa.Connection, table: sa.Table, which: Sequence[sa.ColumnElement[bool]], page: Page
) -> tuple[Sequence[Any], bool]:
    """Rows by their time, and whether there are more. Raises ApiError for an `after` that is not among them."""
    import sqlalchemy as sa

    key = sa.tuple_(table.c.created, table.c.id)
    query = sa.select(table).where(*which)
    if page.after is not None:
        found = connection.execute(sa.select(table.c.created, table.c.id).where(*which, table.c.id == page.after))
        last = found.first()
        if last is None:
            raise invalid(f"after={page.after[:80]!r}: there is no such entry.", "after")
        here = sa.tuple_(sa.literal(last.created), sa.literal(last.id))
        query = query.where(key > here if page.order == "asc" else key < here)
    order = (table.c.created, table.c.id)
    query = query.order_by(*(order if page.order == "asc" else [column.desc() for column in order]))
    rows = connection.execute(query.limit(page.limit + 1)).all()
    return rows[: page.limit], len(rows) > page.limit


def ends_of(entries: Sequence[Any]) -> tuple[str | None, str | None]:
    """The ids that a list names beside its entries: first, last."""
    return (entries[0].id, entries[-1].id) if entries else (None, None)
