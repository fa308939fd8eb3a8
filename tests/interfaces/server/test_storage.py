"""Where the server keeps things: on disk and back, among tenants, within bounds, and with a disk that fails."""

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import threading

import pytest
import sqlalchemy as sa

from quire.errors import UserError
from quire.interfaces.gateway.storage.engine import default_url
from quire.interfaces.gateway.storage.storage import METADATA, SCHEMA_VERSION, Storage, mine, owned_table
from quire.interfaces.server.wire.errors import ApiError

NOTES = owned_table("test_notes", sa.Column("text", sa.Text, nullable=False))
KEPT = owned_table("test_kept", expires=False)
DAY = 86_400
SECRET = "a text that nobody may find again"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data" / "server.db"


@pytest.fixture
def storage(path, clock):
    opened = []

    def make(url: str = "", **limits) -> Storage:
        limits = {"max_bytes": 10_000, "max_age_seconds": 30 * DAY, **limits}
        opened.append(Storage(url or f"sqlite:///{path}", clock=clock, **limits))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


async def write(storage: Storage, name: str, text: str = "text", tenant: str = "", table=NOTES) -> None:
    now = storage.clock()
    row = {"id": name, "tenant": tenant, "created": now, "used": now, "num_bytes": len(text)}
    values = row | ({"text": text} if table is NOTES else {})
    await storage.run(lambda connection: connection.execute(table.insert().values(values)), adds_bytes=len(text))


async def read(storage: Storage, name: str, tenant: str = "") -> str | None:
    query = sa.select(NOTES.c.text).where(mine(NOTES, tenant, name))
    return await storage.run(lambda connection: connection.execute(query).scalar())


async def names(storage: Storage, table=NOTES) -> list[str]:
    query = sa.select(table.c.id).order_by(table.c.id)
    return await storage.run(lambda connection: list(connection.execute(query).scalars()))


async def failure(awaitable) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await awaitable
    return caught.value


def test_what_is_written_survives_the_process(run, storage):
    async def main():
        first = storage()
        await write(first, "a", "text 😀")
        first.close()
        assert await read(storage(), "a") == "text 😀"

    run(main())


def test_nobody_reads_the_rows_of_another(run, storage):
    async def main():
        one = storage()
        await write(one, "a", "text", tenant="red")
        assert await read(one, "a", tenant="blue") is None
        assert await read(one, "a", tenant="") is None
        assert await read(one, "a", tenant="red") == "text"

    run(main())


def test_the_file_is_for_its_owner_alone(run, storage, path):
    async def main():
        await write(storage(), "a")
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        files = [path, *path.parent.glob("server.db-*")]
        assert len(files) == 3
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}

    run(main())


def test_the_default_is_in_the_users_data_folder(monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_url() == "sqlite:////data/quire/server.db"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_url() == "sqlite:////home/someone/.local/share/quire/server.db"


def test_a_mistake_of_work_changes_nothing(run, storage):
    async def main():
        one = storage()

        def work(connection):
            connection.execute(NOTES.insert().values(id="a", tenant="", created=0, used=0, num_bytes=1, text=""))
            raise ApiError(404, "not there")

        assert (await failure(one.run(work))).status == 404
        assert await names(one) == []
        # our own mistake is no failure of the disk
        await write(one, "a")
        with pytest.raises(sa.exc.IntegrityError):
            await write(one, "a")
        await one.check()

    run(main())


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_what_nobody_used_for_long_is_deleted(run, storage, clock):
    async def main():
        one = storage(max_age_seconds=DAY)
        await write(one, "old")
        await write(one, "kept", table=KEPT)
        clock.now += DAY / 2
        await write(one, "new")
        one.close()
        clock.now += DAY * 0.6
        again = storage(max_age_seconds=DAY)
        await again.open()
        assert await names(again) == ["new"]
        assert await names(again, KEPT) == ["kept"]

    run(main())


def test_the_tenant_that_takes_most_gives_first(run, storage, clock):
    async def main():
        one = storage(max_bytes=1000)
        await write(one, "small", "x" * 150, tenant="small")
        for number in range(9):
            clock.now += 1
            await write(one, f"large{number}", "x" * 100, tenant="large")
        # 1050 bytes: down to 900, the oldest of the one that has most
        assert await names(one) == [*(f"large{number}" for number in range(2, 9)), "small"]

    run(main())


def test_what_is_deleted_is_gone_from_the_file(run, storage, path):
    async def main():
        one = storage(max_bytes=2**30)
        await write(one, "a", SECRET * 5000)
        assert SECRET.encode() in contents(path)
        await one.run(lambda connection: connection.execute(NOTES.delete()), erases=True)
        assert SECRET.encode() not in contents(path)
        # and takes no room there
        assert len(contents(path)) < 100_000 + 2 * 32_768

    run(main())


def contents(path) -> bytes:
    return b"".join(file.read_bytes() for file in path.parent.iterdir())


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_full_disk_is_a_507_and_nothing_else(run, storage):
    async def main():
        one = storage(max_bytes=2**30)
        await write(one, "a")
        pages = await one.run(lambda connection: connection.exec_driver_sql("PRAGMA page_count").scalar())
        await one.run(lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}"))
        error = await failure(write(one, "b", "x" * 100_000))
        assert (error.status, error.code) == (507, "insufficient_storage")
        assert error.headers["x-should-retry"] == "false"
        # the next one need not compute an answer to find out
        assert (await failure(one.check())).status == 507
        assert await read(one, "a") == "text"
        await one.run(lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 100}"))
        await write(one, "b", "x" * 100_000)

    run(main())


def test_a_sweep_that_fails_takes_nothing_back(run, storage, monkeypatch):
    async def main():
        one = storage(max_bytes=2**30)
        monkeypatch.setattr(one._retention, "sweep", lambda *_: 1 // 0)
        await write(one, "a")
        assert await read(one, "a") == "text"
        await write(one, "b")

    run(main())


def test_a_sweep_makes_tables_that_were_declared_since(run, storage, caplog):
    async def main():
        one = storage()
        await one.open()
        late = owned_table("test_late")
        try:
            one._swept_at = 0.0  # it is due
            one._sweep(0)
        finally:
            METADATA.remove(late)

    run(main())
    assert caplog.text == ""


def test_a_read_only_file_is_found_at_once(run, storage, path):
    async def main():
        first = storage()
        await write(first, "a")
        first.close()
        one = storage(f"sqlite:///file:{path}?mode=ro&uri=true")
        error = await failure(one.check())
        assert error.status == 503
        assert str(path) not in error.message
        with pytest.raises(UserError, match="readonly"):
            await one.open()

    run(main())


def test_a_file_that_is_no_database(run, storage, path):
    async def main():
        path.parent.mkdir()
        path.write_bytes(b"something else " * 1000)
        one = storage()
        assert (await failure(one.check())).status == 503
        with pytest.raises(UserError, match="not a database"):
            await one.open()
        assert path.read_bytes().startswith(b"something else")

    run(main())


def test_a_file_of_a_newer_program_is_left_alone(run, storage, path):
    async def main():
        first = storage()
        await write(first, "a")
        first.close()
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE quire_schema SET version = ?", [SCHEMA_VERSION + 1])
        one = storage()
        text = rf"storage_url=.*newer Quire \(version {SCHEMA_VERSION + 1}.*knows {SCHEMA_VERSION}\)\. Update"
        with pytest.raises(UserError, match=text):
            await one.open()
        assert (await failure(write(one, "b"))).status == 503

    run(main())


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("nothing", r"storage_url=nothing: this is no URL .* Give one such as sqlite:"),
        ("magic://user:secret@host/name", r"storage_url=magic://user:\*\*\*@host/name: this is no URL"),
        ("postgresql://user:secret@host:port/name", r"storage_url=postgresql\.\.\.: this is no URL"),
        ("oracle+cx_oracle://user:secret@host/name", "cx_Oracle is needed"),
        ("sqlite:////proc/none/server.db", "storage_url=sqlite:////proc/none"),
    ],
)
def test_an_address_that_can_never_work(run, storage, url, text):
    async def main():
        with pytest.raises(UserError, match=text) as caught:
            await storage(url).open()
        assert "secret" not in str(caught.value)

    run(main())


def test_a_queue_that_is_full_refuses(run, storage, monkeypatch):
    monkeypatch.setattr("quire.interfaces.gateway.storage.storage._MOST_WAITING", 2)

    async def main():
        one = storage()
        begun, go_on = threading.Event(), threading.Event()

        def slow(connection):
            begun.set()
            go_on.wait(20)

        held = asyncio.ensure_future(one.run(slow))
        await asyncio.to_thread(begun.wait, 20)
        waiting = [asyncio.ensure_future(write(one, name)) for name in "ab"]
        await asyncio.sleep(0)
        assert (await failure(write(one, "c"))).status == 503
        go_on.set()
        await asyncio.gather(held, *waiting)
        assert await names(one) == ["a", "b"]

    run(main())


def test_a_disk_that_says_nothing_is_given_up(run, storage, monkeypatch):
    monkeypatch.setattr("quire.interfaces.gateway.storage.storage._DEADLINE_SECONDS", 0.05)

    async def main():
        one = storage()
        go_on = threading.Event()
        assert (await failure(one.run(lambda connection: go_on.wait(20)))).status == 503
        go_on.set()

    run(main())


def test_two_servers_share_a_file(run, storage):
    async def main():
        one, other = storage(), storage()
        await asyncio.gather(*(write(server, f"{n}{i}") for n, server in enumerate((one, other)) for i in range(20)))
        assert len(await names(one)) == len(await names(other)) == 40

    run(main())


@pytest.mark.parametrize("num_made_by_another", [1, 3])
def test_another_server_that_makes_the_tables_at_the_same_moment(run, storage, monkeypatch, num_made_by_another):
    """Table by table it is first."""
    create_all, made = METADATA.create_all, []

    def too_late(engine, tables=None):
        there = sa.inspect(engine).get_table_names()
        missing = [table for table in METADATA.sorted_tables if table.name not in there]
        if tables is None and len(made) < num_made_by_another and missing:
            made.append(missing[0])
            create_all(engine, missing[:1])
            raise sa.exc.OperationalError("CREATE TABLE", {}, sqlite3.OperationalError("table already exists"))
        create_all(engine, tables)

    monkeypatch.setattr(METADATA, "create_all", too_late)

    async def main():
        server = storage()
        await write(server, "a")
        assert await names(server) == ["a"]

    run(main())
    assert made


def test_tables_that_cannot_be_made_are_not_tried_for_ever(run, storage, monkeypatch):
    def fails(engine, tables=None):
        raise sa.exc.OperationalError("CREATE TABLE", {}, sqlite3.OperationalError("disk I/O error"))

    monkeypatch.setattr(METADATA, "create_all", fails)

    async def main():
        with pytest.raises(ApiError):
            await write(storage(), "a")

    run(main())


WRITER = """
import asyncio, sys
import sqlalchemy as sa
from quire.interfaces.gateway.storage.storage import Storage, owned_table
table = owned_table("test_kill", sa.Column("text", sa.Text))
async def main():
    storage = Storage(sys.argv[1], max_bytes=2**30, max_age_seconds=1e9)
    for number in range(10**9):
        row = {"id": str(number), "tenant": "", "created": 0, "used": 2e9, "num_bytes": 1, "text": "x" * 5000}
        await storage.run(lambda connection: connection.execute(table.insert().values(row)))
        print(number, flush=True)
asyncio.run(main())
"""


def test_what_was_said_to_be_stored_survives_a_kill(path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, f"sqlite:///{path}"], stdout=subprocess.PIPE, text=True)
    try:
        said = [int(process.stdout.readline()) for _ in range(50)]
    finally:
        process.kill()
    said += [int(line) for line in process.communicate()[0].splitlines()]
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        found = {int(name) for (name,) in connection.execute("SELECT id FROM test_kill")}
    assert set(said) <= found
    # and at most the one that was being written
    assert len(found) <= len(said) + 1


def test_its_numbers_can_be_seen(run, storage):
    async def main():
        one = storage()
        await write(one, "a", "x" * 123)
        assert one.statistics() == {"storage_bytes": 123, "storage_waiting": 0, "storage_failures_total": 0}
        await one.run(lambda connection: connection.exec_driver_sql("PRAGMA query_only = ON"))
        assert (await failure(write(one, "b"))).status == 503
        assert one.statistics()["storage_failures_total"] == 1

    run(main())


# ---- what families declare ------------------------------------------------------------------------------------------


def test_every_table_is_one_of_tenants():
    from quire.interfaces.gateway.responses import stored

    assert stored.RESPONSES.name in METADATA.tables
    for table in METADATA.tables.values():
        assert table.name == "quire_schema" or {"id", "tenant", "created", "used", "num_bytes"} <= set(table.c.keys())


@pytest.mark.nightly
@pytest.mark.skipif("QUIRE_TEST_POSTGRESQL" not in os.environ, reason="no QUIRE_TEST_POSTGRESQL=postgresql+psycopg://")
def test_postgresql(run, storage, clock):
    async def main():
        one = storage(os.environ["QUIRE_TEST_POSTGRESQL"], max_bytes=1000)
        await one.run(lambda connection: [connection.execute(table.delete()) for table in (NOTES, KEPT)])
        await write(one, "a", "text 😀", tenant="red")
        assert await read(one, "a", tenant="red") == "text 😀"
        assert await read(one, "a", tenant="blue") is None
        with pytest.raises(sa.exc.IntegrityError):
            await write(one, "a", tenant="blue")
        for number in range(12):
            clock.now += 1
            await write(one, f"b{number}", "x" * 100, tenant="blue")
        assert len(await names(one)) < 12
        await one.run(lambda connection: connection.execute(NOTES.delete()), erases=True)
        one.close()
        again = storage(os.environ["QUIRE_TEST_POSTGRESQL"])
        assert await names(again) == []

    run(main())
