"""Lists that come in pages, as OpenAI's API has them: limit, order, and the id after which a page begins.

Pages of tables are cut by their database (storage/pages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from fastapi import Query

from quire.interfaces.server.wire.errors import ApiError, invalid

_T = TypeVar("_T")
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


def page_of_list(entries: Sequence[_T], page: Page, id_of: Callable[[_T], str]) -> tuple[Sequence[_T], bool]:
    """Of entries that are at hand, oldest first; and whether there are more. Raises ApiError for an `after` that is not
    among them."""
    in_order = entries if page.order == "asc" else entries[::-1]
    begin = 0
    if page.after is not None:
        ids = [id_of(entry) for entry in in_order]
        if page.after not in ids:
            raise no_such_entry(page.after)
        begin = ids.index(page.after) + 1
    return in_order[begin : begin + page.limit], begin + page.limit < len(in_order)


def no_such_entry(after: str) -> ApiError:
    return invalid(f"after={after[:80]!r}: there is no such entry.", "after")


def ends_of(entries: Sequence[_T], id_of: Callable[[_T], str] | None = None) -> tuple[str | None, str | None]:
    """The ids that a list names beside its entries: first, last."""
    read: Callable[[Any], str] = id_of or (lambda entry: entry.id)
    return (read(entries[0]), read(entries[-1])) if entries else (None, None)
