"""/v1/files through the official client, and what may go wrong between a socket and a disk."""

import asyncio
import errno
import os
import sqlite3
import stat

import httpx2 as httpx
import openai
import pytest
import sqlalchemy as sa

from quire.interfaces.gateway import services
from quire.interfaces.gateway.files import disk
from quire.interfaces.gateway.files.records import FileRecords
from quire.interfaces.gateway.storage import full_disk
from quire.interfaces.server.serving import Readiness
from quire.interfaces.server.wire.errors import unavailable

LINES = b'{"custom_id": "a"}\n'


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "files"


@pytest.fixture
def filing(served, folder):
    """`async with filing(...) as server`: a server whose files lie in `folder`."""
    return lambda **options: served(files_folder=str(folder), **options)


def stored(folder):
    """Names of what lies in the folder."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != "open-batches")


def with_code(code):
    """A failure as SQLite reports it."""
    error = sqlite3.OperationalError("of a test")
    error.sqlite_errorcode = code
    return error


def with_state(state):
    """A failure as PostgreSQL's driver reports it."""
    error = Exception("of a test")
    error.sqlstate = state
    return error


async def upload(server, data=LINES, filename="in.jsonl", fields=(("purpose", "batch"),)):
    return await server.http.post("/v1/files", data=dict(fields), files={"file": (filename, data)})


def test_a_file_comes_back_as_it_went(run, filing, folder, official):
    async def main():
        async with filing() as server:
            client = official(server)
            made = await client.files.create(file=("in.jsonl", LINES), purpose="batch")
            assert (made.bytes, made.filename, made.purpose, made.object) == (len(LINES), "in.jsonl", "batch", "file")
            assert await client.files.retrieve(made.id) == made
            content = await client.files.content(made.id)
            assert content.content == LINES
            assert content.response.headers["x-content-type-options"] == "nosniff"
            assert (await client.files.delete(made.id)).deleted
            for call in (client.files.retrieve, client.files.content, client.files.delete):
                with pytest.raises(openai.NotFoundError) as caught:
                    await call(made.id)
                assert caught.value.code == "file_not_found"
            assert stored(folder) == []

    run(main())


def test_slow_uploads_of_one_tenant_hold_no_other(run, filing):
    async def main():
        async with filing(api_keys=["first", "second"]) as server:
            hold = asyncio.Event()

            async def slow():
                yield b"--edge"
                await hold.wait()

            kind = {"content-type": "multipart/form-data; boundary=edge"}
            headers = {"authorization": "Bearer first", **kind}
            slow_ones = [
                asyncio.ensure_future(server.http.post("/v1/files", content=slow(), headers=headers)) for _ in range(20)
            ]
            await asyncio.sleep(0)
            headers = {"authorization": "Bearer second"}
            files = {"file": ("in.jsonl", LINES)}
            for _ in range(3):
                answer = await server.http.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers)
                assert answer.status_code == 200
            hold.set()
            assert {answer.status_code for answer in await asyncio.gather(*slow_ones)} == {400}

    run(main())


def test_pages(run, filing, official):
    async def main():
        async with filing() as server:
            client = official(server)
            ids = [(await client.files.create(file=(f"{n}", LINES), purpose="batch")).id for n in range(5)]
            newest = await client.files.list(limit=2)
            assert [file.id for file in newest.data] == [ids[4], ids[3]]
            assert newest.has_more
            # the client follows the pages by itself
            assert [file.id async for file in client.files.list(limit=2)] == ids[::-1]
            assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
            assert [file.id async for file in client.files.list(purpose="batch_output")] == []
            for query in ("limit=0", "limit=x", "order=up", "after=file-none"):
                answer = await server.http.get(f"/v1/files?{query}")
                assert answer.status_code == 400, query

    run(main())


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "..\\..\\x",
        "x" * 5000,
        "file:///proc/self/environ",
        "%2e%2e%2fx",
        "😀",
    ],
)
def test_a_name_is_never_a_path(run, filing, folder, tmp_path, name):
    """SEC-16."""

    async def main():
        before = sorted(path for path in tmp_path.rglob("*") if folder not in path.parents)
        async with filing() as server:
            boundary = b"b0undary"
            shown = name.replace("\\", "\\\\")
            body = b"".join(
                [
                    b'--b0undary\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
                    f'--b0undary\r\nContent-Disposition: form-data; name="file"; filename="{shown}"\r\n'.encode(),
                    b"Content-Type: application/octet-stream\r\n\r\nhello\r\n--b0undary--\r\n",
                ]
            )
            headers = {"content-type": f"multipart/form-data; boundary={boundary.decode()}"}
            answer = await server.http.post("/v1/files", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
            (only,) = stored(folder)
            assert only == answer.json()["id"]
            assert (folder / only).read_bytes() == b"hello"
            assert answer.json()["filename"] == name[:255]
            content = await server.http.get(f"/v1/files/{only}/content")
            assert content.content == b"hello"
        after = sorted(path for path in tmp_path.rglob("*") if folder not in path.parents)
        assert [path for path in after if path not in before and path != folder and "model" not in str(path)] == []

    run(main())


@pytest.mark.parametrize("file_id", ["..%2f..%2fetc%2fpasswd", "file-", "file-" + "0" * 32, "%00", "open-batches"])
def test_an_id_is_never_a_path(run, filing, file_id):
    async def main():
        async with filing() as server:
            for path in (file_id, f"{file_id}/content"):
                answer = await server.http.get(f"/v1/files/{path}")
                assert answer.status_code == 404
            assert (await server.http.delete(f"/v1/files/{file_id}")).status_code == 404

    run(main())


def test_what_lies_on_the_disk_is_private(run, filing, folder):
    async def main():
        async with filing() as server:
            made = (await upload(server)).json()
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE((folder / made["id"]).stat().st_mode) == 0o600

    run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([("purpose", "fine-tune")], "purpose"),
        ([("purpose", "batch_output")], "purpose"),
        ([("purpose", "nonsense")], "purpose"),
        ([], "purpose"),
        ([("purpose", "batch"), ("porpoise", "x")], "porpoise"),
        ([("purpose", "batch"), ("expires_after[anchor]", "created_at")], "expires_after"),
        (
            [("purpose", "batch"), ("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "5")],
            "expires_after",
        ),
        ([("purpose", "x" * 2000)], "purpose"),
    ],
)
def test_fields_are_checked(run, filing, folder, fields, param):
    async def main():
        async with filing() as server:
            answer = await upload(server, fields=fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
            assert stored(folder) == []

    run(main())


def form(*parts, end=b"--b--\r\n"):
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end


PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
FILE = b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\nhello'


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (form(PURPOSE, FILE), "multipart/form-data; boundary=b", 200),
        (form(FILE, PURPOSE), 'multipart/form-data; boundary="b"', 200),
        (b"preamble\r\n" + form(PURPOSE, FILE) + b"epilogue", "multipart/form-data; boundary=b", 200),
        (form(PURPOSE, FILE, end=b""), "multipart/form-data; boundary=b", 400),
        (form(PURPOSE, FILE)[:60], "multipart/form-data; boundary=b", 400),
        (form(PURPOSE), "multipart/form-data; boundary=b", 400),
        (form(PURPOSE, FILE, FILE), "multipart/form-data; boundary=b", 400),
        (
            form(PURPOSE, *[PURPOSE.replace(b"purpose", b"p%d" % n) for n in range(20)]),
            "multipart/form-data; boundary=b",
            400,
        ),
        (form(PURPOSE, b"X: " + b"x" * 10_000 + b"\r\n\r\nhello"), "multipart/form-data; boundary=b", 400),
        (form(PURPOSE, b"X: y\r\n\r\nhello"), "multipart/form-data; boundary=b", 400),
        (form(PURPOSE, FILE.replace(b'"x"', b'"x\0"')), "multipart/form-data; boundary=b", 400),
        (form(PURPOSE, FILE.replace(b'"x"', b'"' + b";" * 8000 + b'"')), "multipart/form-data; boundary=b", 400),
        (form(PURPOSE, FILE), 'multipart/form-data; boundary="' + ";" * 60_000, 400),
        (b"", "multipart/form-data; boundary=b", 400),
        (form(PURPOSE, FILE), "multipart/form-data", 400),
        (form(PURPOSE, FILE), f"multipart/form-data; boundary={'b' * 80}", 400),
        (b"{}", "application/json", 415),
        (b"{}", "", 415),
    ],
)
def test_forms(run, filing, folder, body, content_type, status):
    async def main():
        async with filing() as server:
            headers = {"content-type": content_type}
            answer = await server.http.post("/v1/files", content=body, headers=headers)
            assert answer.status_code == status, answer.text
            assert len(stored(folder)) == (status == 200) if folder.exists() else status != 200

    run(main())


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_a_body_may_be_cut_anywhere(run, size):
    """Also inside the boundary, and where a content looks like one."""
    from quire.interfaces.server.wire.multipart import Part, read_parts

    content = b"\r\n--\r\n--bound\r\n--boundar\r\r\n--" * 3

    async def chunks(body):
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async def main():
        body = b"--boundary\r\n" + FILE.replace(b"hello", content) + b"\r\n--boundary--\r\n"
        items = [item async for item in read_parts(chunks(body), b"boundary")]
        assert items[0] == Part("file", "x")
        assert b"".join(items[1:]) == content

    run(main())


def test_a_file_has_a_limit_and_a_tenant_a_quota(run, filing, folder):
    async def main():
        async with filing(max_file_bytes=1000, max_tenant_file_bytes=1500) as server:
            large = await upload(server, b"x" * 1001)
            assert (large.status_code, large.json()["error"]["code"]) == (413, "file_too_large")
            announced = await upload(server, b"x" * 1_000_000)
            assert announced.status_code == 413
            first = await upload(server, b"x" * 1000)
            assert first.status_code == 200
            second = await upload(server, b"x" * 501)
            assert (second.status_code, second.json()["error"]["code"]) == (507, "file_quota_exceeded")
            assert second.headers["x-should-retry"] == "false"
            assert stored(folder) == [first.json()["id"]]
            await server.http.delete(f"/v1/files/{first.json()['id']}")
            assert (await upload(server, b"x" * 501)).status_code == 200

    run(main())


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [(errno.ENOSPC, 507, "insufficient_storage"), (errno.EROFS, 503, "storage_unavailable"), (errno.EMFILE, 503, None)],
)
@pytest.mark.parametrize("where", ["open", "write", "fsync"])
def test_a_disk_that_takes_nothing(run, filing, folder, monkeypatch, where, number, status, code):
    """F15: a clear answer, nothing half written, and the server goes on when there is room again."""

    async def main():
        async with filing() as server:

            def fail(*args, **kwargs):
                raise OSError(number, os.strerror(number))

            with monkeypatch.context() as patch:
                patch.setattr(disk.os, where, fail)
                answer = await upload(server)
            assert answer.status_code == status, answer.text
            assert code in (None, answer.json()["error"]["code"])
            assert stored(folder) == []
            assert (await upload(server)).status_code == 200

    run(main())


def test_a_database_without_room(run, filing, folder):
    """The same answer as a folder without room gives: they lie on one disk."""

    async def main():
        async with filing() as server:
            first = (await upload(server)).json()["id"]
            storage = server.services.storage
            pages = await storage.run(lambda one: one.exec_driver_sql("PRAGMA page_count").scalar())
            await storage.run(lambda one: one.exec_driver_sql(f"PRAGMA max_page_count = {pages}"))
            # rows that fit into the last page are taken
            names = (f"{number}{'x' * 200}" for number in range(200))
            answers = [await upload(server, filename=name) for name in names]
            refused = [answer for answer in answers if answer.status_code != 200]
            assert 0 < len(refused) < len(answers)
            assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {
                (507, "insufficient_storage")
            }
            assert (await server.http.get(f"/v1/files/{first}")).status_code == 200
            files = (await server.http.get("/v1/files", params={"limit": 1000})).json()["data"]
            assert stored(folder) == sorted(file["id"] for file in files)
            batch = {"input_file_id": first, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            assert (await server.post("/v1/batches", batch)).status_code == 507

    run(main())


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (OSError(errno.EACCES, "no"), False),
        (sqlite3.OperationalError("without a code"), False),
        (with_code(sqlite3.SQLITE_FULL), True),
        (with_code(sqlite3.SQLITE_IOERR_WRITE), False),
        # PostgreSQL's disk_full, and a deadlock
        (with_state("53100"), True),
        (with_state("40P01"), False),
    ],
)
def test_what_a_full_disk_looks_like(error, is_full):
    assert full_disk.is_full(error) is is_full


def test_a_folder_that_cannot_be_used(run, filing, folder):
    """The server lives, says so, and stores files when it can."""

    async def main():
        folder.write_text("no folder")
        async with filing() as server:
            answer = await upload(server)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
            assert str(folder) not in answer.text
            assert (await server.http.get("/v1/batches")).status_code == 503
            folder.unlink()
            assert (await upload(server)).status_code == 200

    run(main())


def test_a_storage_that_takes_nothing(run, filing, folder, monkeypatch):
    """The bytes are written before the row; without the row they go again."""

    async def main():
        async with filing() as server:
            assert (await upload(server)).status_code == 200
            before = stored(folder)

            async def fail(*args, **kwargs):
                raise unavailable("The server's storage is not available.")

            with monkeypatch.context() as patch:
                patch.setattr(FileRecords, "insert", fail)
                assert (await upload(server)).status_code == 503
            assert stored(folder) == before
            assert len((await server.http.get("/v1/files")).json()["data"]) == 1

    run(main())


def test_a_client_that_goes_leaves_nothing(run, filing, folder):
    async def main():
        async with filing() as server:
            messages = [
                {"type": "http.request", "body": form(PURPOSE, FILE + b"x" * 2**21)[: 2**20 + 100], "more_body": True},
                {"type": "http.disconnect"},
            ]

            async def receive():
                return messages.pop(0)

            async def send(message):
                pass

            scope = {
                "type": "http", "method": "POST", "path": "/v1/files", "raw_path": b"/v1/files", "query_string": b"",
                "headers": [(b"host", b"x"), (b"content-type", b"multipart/form-data; boundary=b")],
                "http_version": "1.1", "scheme": "http", "server": ("quire.test", 80), "client": None, "root_path": "",
                "asgi": {},
            }  # fmt: skip
            await server.app(scope, receive, send)
            assert messages == []
            assert stored(folder) == []

    run(main())


@pytest.mark.parametrize(
    ("asked", "status", "size"), [("bytes=0-1", 206, None), ("bytes=99999-", 416, "bytes */"), ("lines=1-2", 400, None)]
)
def test_a_part_of_a_file(run, filing, asked, status, size):
    async def main():
        async with filing() as server:
            file_id = (await upload(server)).json()["id"]
            answer = await server.http.get(f"/v1/files/{file_id}/content", headers={"range": asked})
            assert answer.status_code == status
            if status == 206:
                assert len(answer.content) == 2
            else:
                assert answer.json()["error"]["message"].startswith("Range: must be bytes=")
            if size is not None:
                assert answer.headers["content-range"].startswith(size)

    run(main())


def test_an_upload_that_trickles_ends(run, filing, folder):
    """Each piece comes in time, and the last one never."""

    async def main():
        async with filing(max_request_seconds=0.5) as server:

            async def endless():
                yield form(PURPOSE, FILE, end=b"")
                while True:
                    yield b"x"
                    await asyncio.sleep(0)

            kind = {"content-type": "multipart/form-data; boundary=b"}
            # also those that wait for their turn
            calls = [server.http.post("/v1/files", content=endless(), headers=kind) for _ in range(12)]
            for answer in await asyncio.gather(*calls):
                assert answer.status_code == 408
                assert "max_request_seconds" in answer.json()["error"]["message"]
                assert answer.headers["connection"] == "close"
            assert len(server.state.in_flight) == 0
            assert stored(folder) == []
            assert (await upload(server, b"")).status_code == 200

    run(main())


def test_a_server_that_ends_waits_for_an_upload(run, filing, folder):
    async def main():
        async with filing() as server:
            go_on = asyncio.Event()

            async def slow():
                yield form(PURPOSE, FILE, end=b"")
                await go_on.wait()
                yield b"--b--\r\n"

            def begin():
                kind = {"content-type": "multipart/form-data; boundary=b"}
                return asyncio.ensure_future(server.http.post("/v1/files", content=slow(), headers=kind))

            finished = begin()
            while not len(server.state.in_flight):
                await asyncio.sleep(0)
            server.state.serving.readiness = Readiness.STOPPING
            idle = asyncio.ensure_future(server.state.in_flight.wait_empty())
            await asyncio.sleep(0)
            assert not idle.done()
            go_on.set()
            assert (await finished).status_code == 200
            await idle
            # and one that takes too long is ended
            server.state.serving.readiness = Readiness.READY
            go_on.clear()
            ended = begin()
            while not len(server.state.in_flight):
                await asyncio.sleep(0)
            server.state.in_flight.interrupt_all(unavailable("The server is shutting down."))
            assert (await ended).status_code == 503
            assert len(stored(folder)) == 1

    run(main())


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_server_that_ends_waits_for_a_download(run, filing, on_a_socket, caplog, is_in_time):
    data = bytes(16 * 2**20)  # more than the system takes for a client that does not read

    async def main():
        async with filing() as server, on_a_socket(server) as url:
            file_id = (await upload(server, data)).json()["id"]
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"GET /v1/files/%b/content HTTP/1.1\r\nhost: x\r\n\r\n" % file_id.encode())
            assert b"content-length: %d" % len(data) in await reader.readuntil(b"\r\n\r\n")
            assert len(server.state.in_flight) == 1
            if is_in_time:
                assert await reader.readexactly(len(data)) == data
            else:
                server.state.in_flight.interrupt_all(unavailable("The server is shutting down."))
                assert len(await reader.read()) < len(data)
            await server.state.in_flight.wait_empty()
            writer.close()

    run(main())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_download_that_its_client_gives_up_is_no_success(run, filing, on_a_socket, caplog):
    caplog.set_level("INFO", "quire.server.access")
    route, data = "/v1/files/{file_id}/content", bytes(16 * 2**20)

    async def main():
        async with filing() as server, on_a_socket(server) as url:
            counts = server.state.metrics
            file_id = (await upload(server, data)).json()["id"]
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"GET /v1/files/%b/content HTTP/1.1\r\nhost: x\r\n\r\n" % file_id.encode())
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()
            await server.state.in_flight.wait_empty()
            while not counts.http_responses.value(route, "499"):
                await asyncio.sleep(0)
            assert counts.requests_aborted.value("client_gone") == 1
            assert counts.http_responses.value(route, "200") == 0
            # and whoever takes it all, or its head, or a part of it, has it
            for method, headers, status in (("GET", {}, 200), ("HEAD", {}, 200), ("GET", {"range": "bytes=0-9"}, 206)):
                answer = await server.http.request(method, f"/v1/files/{file_id}/content", headers=headers)
                assert answer.status_code == status
            assert counts.http_responses.value(route, "499") == 1

    run(main())
    [line] = [one.getMessage() for one in caplog.records if " 499 " in one.getMessage()]
    assert line.startswith(f"GET {route} 499 ")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_nothing_that_a_database_cannot_take_reaches_it(run, filing):
    """PostgreSQL has no NUL in its texts, and would answer with a failure of ours."""

    def check(connection, cursor, statement, parameters, context, many):
        assert "\0" not in repr(parameters).encode().decode("unicode_escape"), statement

    async def main():
        async with filing() as server:
            await upload(server)
            file = (await upload(server)).json()["id"]
            sa.event.listen(sa.Engine, "before_cursor_execute", check)
            try:
                for path, status in (
                    ("/v1/files?after=%00", 400),
                    (f"/v1/files?after={file}%00", 400),
                    ("/v1/files?purpose=batch%00", 200),
                    ("/v1/files/%00", 404),
                    ("/v1/batches?after=%00", 400),
                    ("/v1/batches/%00", 404),
                    ("/v1/responses/%00", 404),
                    ("/v1/responses/resp_0/input_items?after=%00", 404),
                ):
                    assert (await server.http.get(path)).status_code == status, path
                assert (await server.http.get("/v1/files?purpose=batch%00")).json()["data"] == []
                assert (await server.http.delete("/v1/files/%00")).status_code == 404
                assert (await server.http.post("/v1/batches/%00/cancel")).status_code == 404
                body = {"input": "Hi", "previous_response_id": "\0"}
                assert (await server.post("/v1/responses", body)).status_code == 400
                batch = {"input_file_id": "\0", "endpoint": "/v1/completions", "completion_window": "24h"}
                assert (await server.post("/v1/batches", batch)).status_code == 404
            finally:
                sa.event.remove(sa.Engine, "before_cursor_execute", check)

    run(main())


def test_a_file_ends_with_its_time(run, filing, folder, official):
    async def main():
        async with filing() as server:
            client = official(server)
            expires_after = {"anchor": "created_at", "seconds": 3600}
            made = await client.files.create(file=("x", LINES), purpose="batch", expires_after=expires_after)
            assert made.expires_at == made.created_at + 3600
            server.services.storage.clock = lambda: made.created_at + 3601.0
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(made.id)
            assert (await client.files.list()).data == []
            other = await client.files.create(file=("y", LINES), purpose="batch")
            assert stored(folder) == [other.id]

    run(main())


def test_it_leaves_the_disk_although_nobody_uploads_any_more(run, filing, folder, official, monkeypatch):
    monkeypatch.setattr(services, "UPKEEP_SECONDS", 0.01)

    async def main():
        async with filing() as server:
            server.services.resume()
            kept = (await upload(server)).json()["id"]
            expires_after = {"anchor": "created_at", "seconds": 3600}
            made = await official(server).files.create(file=("x", LINES), purpose="batch", expires_after=expires_after)
            assert stored(folder) == sorted([kept, made.id])
            server.services.storage.clock = lambda: made.created_at + 3601.0
            while made.id in stored(folder):
                await asyncio.sleep(0)
            assert stored(folder) == [kept]

    run(main())


def test_so_does_one_of_an_earlier_process(run, filing, folder, official, tmp_path):
    settings = f"sqlite:///{tmp_path / 'server.db'}"

    async def main():
        async with filing(storage_url=settings) as server:
            # where nothing was ever stored, nothing is opened
            await server.services.look_after()
            assert not folder.exists()
            assert server.services.statistics() == {}
            expires_after = {"anchor": "created_at", "seconds": 3600}
            made = await official(server).files.create(file=("x", LINES), purpose="batch", expires_after=expires_after)
        async with filing(storage_url=settings) as server:
            await server.services.look_after()
            assert stored(folder) == [made.id]
            server.services.storage.clock = lambda: made.created_at + 3601.0
            await server.services.look_after()
            assert stored(folder) == []

    run(main())


def test_what_a_crash_left_is_removed(run, filing, folder):
    async def main():
        async with filing() as server:
            kept = (await upload(server)).json()["id"]
            (folder / ("0" * 32 + ".part")).write_bytes(b"half")
            (folder / ("file-" + "0" * 32)).write_bytes(b"without a row")
            (folder / "notes.txt").write_bytes(b"somebody's own")
            for one in folder.iterdir():
                os.utime(one, (0, 0))
            # an upload that is on its way, in this server or in another one
            (folder / ("1" * 32 + ".part")).write_bytes(b"half")
            (folder / ("file-" + "1" * 32)).write_bytes(b"its row comes now")
            await server.services.batches.start()
            assert stored(folder) == sorted([kept, "notes.txt", "1" * 32 + ".part", "file-" + "1" * 32])

    run(main())


def test_tenants_do_not_see_each_other(run, filing):
    async def main():
        async with filing(api_keys=["one", "two"]) as server:
            server.http.headers["authorization"] = "Bearer one"
            made = (await upload(server)).json()["id"]
            transport, headers = httpx.ASGITransport(app=server.app), {"authorization": "Bearer two"}
            async with httpx.AsyncClient(transport=transport, base_url="http://quire.test", headers=headers) as other:
                assert (await other.get("/v1/files")).json()["data"] == []
                assert (await other.get(f"/v1/files/{made}")).status_code == 404
                assert (await other.get(f"/v1/files/{made}/content")).status_code == 404
                assert (await other.delete(f"/v1/files/{made}")).status_code == 404
            assert (await server.http.get(f"/v1/files/{made}")).status_code == 200

    run(main())
