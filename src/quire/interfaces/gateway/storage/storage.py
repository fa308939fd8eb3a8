"""What the server keeps beyond a request, in a database: an SQLite file of the user, or what `storage_url` names.

Owns one thread with one connection; nothing here stops the event loop. A disk that is full makes calls that store 507,
one that is read-only or silent 503, and nothing else. A family of endpoints declares its tables in a file of its own
and hands functions to `run`, each of which is one transaction:

    NOTES = owned_table("notes", sa.Column("text", sa.Text, nullable=False))

    await storage.run(lambda connection: connection.execute(...))

Every row belongs to a tenant, and every query must ask for it (`mine`). Imported by its first use: SQLAlchemy takes a
tenth of a second that a server without stored things does not pay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc

from quire.interfaces.gateway.storage.engine import (
    StorageError,
    StorageFullError,
    connect,
    default_url,
    erase_traces,
    shown,
    storage_error,
)
from quire.interfaces.gateway.storage.full_disk import no_room
from quire.interfaces.gateway.storage.retention import Retention
from quire.interfaces.server.wire.errors import ApiError, unavailable
from quire.interfaces.server.wire.paging import Page, no_such_entry

logger = logging.getLogger("quire.server")

METADATA = sa.MetaData()
# Of all tables together; a change that an older program would misread makes it one more.
SCHEMA_VERSION = 1
_SCHEMA = sa.Table(
    "quire_schema",
    METADATA,
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("opened", sa.Float, nullable=False),
)

_MOST_WAITING = 256
# A disk or a server that says nothing for so long is taken for gone.
_DEADLINE_SECONDS = 20.0
# After a failure, calls that would store are refused before they compute anything, for so long.
_PAUSE_SECONDS = 2.0
_SWEEP_SECONDS = 60.0

_ROW_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")

_T = TypeVar("_T")
Work = Callable[[sa.Connection], _T]


def owned_table(name: str, *columns: sa.Column[Any], expires: bool = True) -> sa.Table:
    """A table whose rows belong to tenants. expires: the oldest use goes first when time or room is over; else the
    family deletes by itself."""
    return sa.Table(
        name,
        METADATA,
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("tenant", sa.String(256), nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("used", sa.Float, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        *columns,
        sa.Index(f"{name}_by_use", "tenant", "used"),
        info={"expires": expires},
    )


def mine(table: sa.Table, tenant: str, row_id: str) -> sa.ColumnElement[bool]:
    """The condition for one row. A row of somebody else is as good as not there."""
    # what cannot be an id is not asked for: not every database takes any text
    return sa.and_(table.c.id == row_id, table.c.tenant == tenant) if is_row_id(row_id) else sa.false()


def is_row_id(text: str) -> bool:
    return bool(_ROW_ID.fullmatch(text))


class _Job(NamedTuple):
    work: Work[Any]
    future: Future[Any]
    adds_bytes: int
    erases: bool


class Storage:
    """Opens at the first use. url None: the user's file. `clock` tells the time that rows are dated with."""

    def __init__(
        self, url: str | None, *, max_bytes: int, max_age_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self._url = url if url is not None else default_url()
        self._retention = Retention(METADATA, max_bytes=max_bytes, max_age_seconds=max_age_seconds)
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._engine: sa.Engine | None = None
        # names of tables that are there for certain
        self._known_tables: set[str] = set()
        self._failed_at = -_PAUSE_SECONDS
        # the last one; None: it said nothing
        self._failure: StorageError | None = None
        self._num_failures = 0
        self._swept_at = 0.0

    async def open(self) -> None:
        """Opens now instead of at the first use. Raises StorageError, a UserError."""
        await self._submit(lambda connection: None)

    async def check(self) -> None:
        """Before work whose result is to be stored: raises 503 or 507 if that would fail as it did a moment ago."""
        if time.monotonic() - self._failed_at < _PAUSE_SECONDS:
            raise _refusal(self._failure)
        if self._engine is None:
            await self.run(lambda connection: None)

    async def run(self, work: Work[_T], *, adds_bytes: int = 0, erases: bool = False) -> _T:
        """What `work` returns or raises, done in a transaction; 503 if the database fails, 507 if it has no room.
        adds_bytes: of the rows that it writes, so that the bound on all of them is kept. erases: it deletes, and no
        trace is to remain."""
        try:
            return await self._submit(work, adds_bytes, erases)
        except StorageError as error:
            logger.error("storage: %s", error)
            raise _refusal(error) from None

    def statistics(self) -> dict[str, float]:
        return {
            "storage_bytes": self._retention.num_bytes,
            "storage_waiting": self._jobs.qsize(),
            "storage_failures_total": self._num_failures,
        }

    async def _submit(self, work: Work[_T], adds_bytes: int = 0, erases: bool = False) -> _T:
        future: Future[_T] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="quire-storage", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(_Job(work, future, adds_bytes, erases))
        except queue.Full:
            raise unavailable(f"More than {_MOST_WAITING} calls wait for the server's storage.") from None
        try:
            async with asyncio.timeout(_DEADLINE_SECONDS):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            logger.error("storage: no answer for %.0f seconds", _DEADLINE_SECONDS)
            self._note_failure(None)
            raise _refusal(None) from None

    def close(self, seconds: float = 2.0) -> None:
        """After what was handed in before. A disk that hangs is not waited for."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(None)
            self._thread.join(seconds)
        self._thread = None

    # ------------------------------------------------------------------------------------------ on the thread

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_SWEEP_SECONDS)
            except queue.Empty:
                self._sweep(0)
                continue
            if job is None:
                break
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(self._transact(job))
                except Exception as error:
                    job.future.set_exception(error)
            # an idle thread must not keep the last caller's objects alive
            del job
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def _transact(self, job: _Job) -> Any:
        """Raises what work raises, or StorageError for what is the database's fault."""
        try:
            engine = self._opened()
            with engine.begin() as connection:
                result = job.work(connection)
            if job.erases:
                erase_traces(engine)
        except (exc.IntegrityError, exc.ProgrammingError, exc.DataError):
            # a mistake of ours
            raise
        except StorageError as error:
            self._note_failure(error)
            raise
        except (exc.DBAPIError, OSError) as error:
            failure = storage_error(self._url, error)
            self._note_failure(failure)
            raise failure from None
        self._sweep(job.adds_bytes)
        return result

    def _note_failure(self, failure: StorageError | None) -> None:
        self._failed_at = time.monotonic()
        self._failure = failure
        self._num_failures += 1

    def _opened(self) -> sa.Engine:
        if self._engine is None:
            engine = connect(self._url)
            try:
                self._check_schema(engine)
            except BaseException:
                engine.dispose()
                raise
            self._engine = engine
        if self._known_tables != METADATA.tables.keys():
            _create_missing(self._engine, None)
            self._known_tables = set(METADATA.tables)
        return self._engine

    def _check_schema(self, engine: sa.Engine) -> None:
        """Writes, too: a database that cannot be written is found here, and not after an answer was computed."""
        _create_missing(engine, [_SCHEMA])
        now = self.clock()
        with engine.begin() as connection:
            version = connection.execute(sa.select(sa.func.max(_SCHEMA.c.version))).scalar()
            if version is None:
                connection.execute(_SCHEMA.insert().values(version=SCHEMA_VERSION, opened=now))
            elif version > SCHEMA_VERSION:
                raise storage_error(
                    self._url,
                    f"it was written by a newer Quire (version {version} of its tables, this one knows "
                    f"{SCHEMA_VERSION}). Update Quire, or give another storage_url",
                )
            else:
                connection.execute(_SCHEMA.update().values(opened=now))

    # ------------------------------------------------------------------------------------------ what is too old

    def _sweep_if_due(self, engine: sa.Engine, adds_bytes: int) -> None:
        is_full = self._retention.add(adds_bytes)
        if is_full or time.monotonic() - self._swept_at >= _SWEEP_SECONDS or not self._swept_at:
            self._swept_at = time.monotonic()
            with engine.begin() as connection:
                num_deleted = self._retention.sweep(connection, self.clock())
            if num_deleted:
                logger.info("storage: %d rows are over their time or the room for all, and deleted", num_deleted)
                erase_traces(engine)

    def _sweep(self, adds_bytes: int) -> None:
        """What goes wrong here neither takes back what was stored just now, nor ends the thread."""
        if self._engine is None:
            return
        try:
            # tables that were declared since it was opened are made first
            self._sweep_if_due(self._opened(), adds_bytes)
        except (exc.DBAPIError, OSError) as error:
            logger.error("storage: %s", storage_error(self._url, error))
        except Exception:
            logger.exception("storage: what is too old could not be deleted")

    def __repr__(self) -> str:
        return f"Storage({shown(self._url)})"


def _create_missing(engine: sa.Engine, tables: list[sa.Table] | None) -> None:
    num_there = -1
    while True:
        try:
            METADATA.create_all(engine, tables)
            return
        except (exc.OperationalError, exc.ProgrammingError, exc.IntegrityError):
            # another server began at the same moment and was first, maybe with the next table as well
            num_before = num_there
            num_there = len(sa.inspect(engine).get_table_names())
            if num_there == num_before:
                raise


def _refusal(failure: StorageError | None) -> ApiError:
    if isinstance(failure, StorageFullError):
        return no_room()
    return unavailable(
        "The server's storage is not available; its log says why. Send the request again later, or with store=false."
    )


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
