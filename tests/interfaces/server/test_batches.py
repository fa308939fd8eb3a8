"""/v1/batches through the official client, on a fake engine: states, results, and what a restart finds."""

import asyncio
import json

import msgspec
import openai
import pytest

from quire.interfaces.gateway.batches.records import BATCHES
from quire.interfaces.gateway.batches.results import Results, answered
from quire.interfaces.server.access.caller import BACKGROUND_PRIORITY

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat_line(name, content="Hi", url=CHAT, **fields):
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def jsonl(*lines):
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


@pytest.fixture
def batching(served, tmp_path):
    """`async with batching(...) as server`. Settings of the services; the storage lives as long as the server."""
    folder = str(tmp_path / "files")
    return lambda **settings: served(files_folder=folder, **settings)


async def begun(client, *lines, endpoint=CHAT, **fields):
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, **{"completion_window": "24h", **fields}
    )


async def ended(server, client, batch):
    """The batch when nothing of it runs any more."""
    await asyncio.gather(*server.services.batches._tasks)
    return await client.batches.retrieve(batch.id)


async def lines_of(client, file_id):
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


async def reached(server, count):
    """Until so many requests are in the engine."""
    while len(server.fake.running) < count:
        server.fake.changed.clear()
        await server.fake.changed.wait()


def test_a_batch(run, batching, official):
    async def main():
        async with batching() as server:
            client = official(server)
            notes = {"who": "me"}
            batch = await begun(
                client,
                *(chat_line(f"r{n}", "x" * n) for n in range(20)),
                chat_line("bad", temperature=-1),
                metadata=notes,
            )
            assert (batch.object, batch.status, batch.endpoint, batch.metadata) == ("batch", "validating", CHAT, notes)
            assert batch.expires_at == batch.created_at + 24 * 3600
            assert batch.output_file_id is None
            batch = await ended(server, client, batch)
            assert (batch.status, batch.errors, batch.model) == ("completed", None, "byte-model")
            assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
            counts = batch.request_counts
            assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
            answers = await lines_of(client, batch.output_file_id)
            assert set(answers) == {f"r{n}" for n in range(20)}
            for number in range(20):
                direct = (await server.chat("x" * number)).json()
                line = answers[f"r{number}"]
                assert line["error"] is None
                assert line["response"]["status_code"] == 200
                body = line["response"]["body"]
                assert body["choices"] == direct["choices"]
                assert body["object"] == "chat.completion"
            used = [line["response"]["body"]["usage"] for line in answers.values()]
            assert batch.usage.total_tokens == sum(one["total_tokens"] for one in used) > 0
            (bad,) = (await lines_of(client, batch.error_file_id)).values()
            assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
            assert bad["response"]["body"]["error"]["param"] == "temperature"
            files = [file async for file in client.files.list(purpose="batch_output")]
            assert {file.id for file in files} == {batch.output_file_id, batch.error_file_id}
            assert {file.filename for file in files} == {f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl"}

    run(main())


def test_completions_are_batched_too(run, batching, official):
    async def main():
        async with batching() as server:
            client = official(server)
            line = {"custom_id": "t", "method": "POST", "url": TEXT, "body": {"prompt": "Hi", "max_tokens": 4}}
            batch = await ended(server, client, await begun(client, line, endpoint=TEXT))
            answer = (await lines_of(client, batch.output_file_id))["t"]
            assert answer["response"]["body"]["object"] == "text_completion"
            assert batch.error_file_id is None

    run(main())


def test_embeddings_are_batched_too(run, batching, official):
    async def main():
        async with batching() as server:
            client = official(server)
            url, body = "/v1/embeddings", {"input": ["Hi", "Ho"], "priority": 7}
            line = {"custom_id": "e", "method": "POST", "url": url, "body": body}
            batch = await ended(server, client, await begun(client, line, endpoint=url))
            answer = (await lines_of(client, batch.output_file_id))["e"]["response"]["body"]
            direct = (await server.post(url, {"input": ["Hi", "Ho"]})).json()
            assert answer.pop("id") != direct.pop("id")
            assert answer.pop("created") <= direct.pop("created")
            assert answer == direct
            assert [request.priority for request in server.requests()] == [BACKGROUND_PRIORITY] * 2 + [0, 0]

    run(main())


def test_every_endpoint_of_batches_can_be_called(run, batching, official):
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
        TEXT: {"prompt": "Hi", "max_tokens": 4},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 20, "store": False},
        "/v1/embeddings": {"input": "Hi"},
        "/v1/classify": {"input": "Hi"},
        "/v1/rerank": {"query": "Hi", "documents": ["Ho"]},
        "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
    }

    async def main():
        async with batching() as server:
            client = official(server)
            calls = server.services.batches._shop.runner.calls
            assert set(calls.paths) == set(bodies)
            for path, body in bodies.items():
                direct = await server.post(path, body)
                called = await calls.call(path, json.dumps(body).encode())
                # whatever it is: an answer, or that this engine has no vectors
                assert called.status_code == direct.status_code, (path, called.body)
                assert set(json.loads(bytes(called.body))) == set(direct.json())
            assert (await client.batches.list()).data == []

    run(main())


def test_interactive_requests_go_first(run, batching, official):
    async def main():
        async with batching() as server:
            client = official(server)
            lines = [chat_line("a"), chat_line("b", priority=5), chat_line("c", priority=BACKGROUND_PRIORITY + 7)]
            await ended(server, client, await begun(client, *lines))
            priorities = sorted(request.priority for request in server.requests())
            assert priorities == [BACKGROUND_PRIORITY, BACKGROUND_PRIORITY, BACKGROUND_PRIORITY + 7]
            await server.chat()
            assert server.requests()[-1].priority == 0

    run(main())


def test_no_clock_but_the_window_ends_a_line(run, batching, official):
    """It gives way to all others, so it may take longer than what somebody waits for."""

    async def main():
        async with batching() as server:
            client = official(server)
            file = await client.files.create(file=("in.jsonl", jsonl(chat_line("a"))), purpose="batch")
            server.services.room.request_seconds = server.services.room.queue_seconds = 0.0
            assert (await server.chat()).status_code in (503, 504)
            batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            batch = await ended(server, client, batch)
            assert batch.request_counts.completed == 1

    run(main())


def test_the_batches_of_one_tenant_do_not_hold_those_of_another(run, served, tmp_path):
    folder = str(tmp_path / "files")

    async def main():
        async with served(api_keys=["first", "second"], files_folder=folder) as server:
            server.fake.hold(0)
            clients = [openai.AsyncOpenAI(base_url="http://quire.test/v1", api_key=key, http_client=server.http)
                       for key in ("first", "second")]  # fmt: skip
            many = [await begun(clients[0], chat_line("a")) for _ in range(6)]
            await reached(server, 4)
            await begun(clients[1], chat_line("b"))
            await reached(server, 5)
            states = [(await clients[0].batches.retrieve(one.id)).status for one in many]
            assert sorted(states) == ["in_progress"] * 4 + ["validating"] * 2
            server.fake.release()
            await asyncio.gather(*server.services.batches._tasks)

    run(main())


def test_a_bounded_number_runs_at_a_time(run, batching, official):
    async def main():
        async with batching(max_batch_concurrency=3) as server:
            client = official(server)
            server.fake.hold(1)
            batches = [await begun(client, *(chat_line(f"{n}") for n in range(10))) for _ in range(2)]
            await reached(server, 3)
            assert len(server.fake.running) == len(server.requests()) == 3
            server.fake.release()
            for batch in batches:
                assert (await ended(server, client, batch)).request_counts.completed == 10

    run(main())


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'"\xff"', "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        ({"method": "POST", "url": CHAT, "body": {}}, "missing_required_parameter", "custom_id"),
        ({"custom_id": "x", "url": CHAT, "body": {}}, "missing_required_parameter", "method"),
        ({"custom_id": "x", "method": "POST", "body": {}}, "missing_required_parameter", "url"),
        ({"custom_id": "x", "method": "POST", "url": CHAT}, "missing_required_parameter", "body"),
        ({"custom_id": 7, "method": "POST", "url": CHAT, "body": {}}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "", "method": "POST", "url": CHAT, "body": {}}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x" * 513, "method": "POST", "url": CHAT, "body": {}}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x", "method": "GET", "url": CHAT, "body": {}}, "invalid_method", "method"),
        ({"custom_id": "x", "method": "POST", "url": TEXT, "body": {}}, "mismatched_endpoint", "url"),
        (
            {"custom_id": "x", "method": "POST", "url": "http://127.0.0.1/" + CHAT, "body": {}},
            "mismatched_endpoint",
            "url",
        ),
        ({"custom_id": "x", "method": "POST", "url": CHAT, "body": "hello"}, "invalid_body", "body"),
        (chat_line("first"), "duplicate_custom_id", "custom_id"),
    ],
)
def test_a_file_with_a_line_that_is_no_request_is_refused(run, batching, official, line, code, param):
    async def main():
        async with batching() as server:
            client = official(server)
            batch = await ended(server, client, await begun(client, chat_line("first"), b"", line, chat_line("last")))
            assert (batch.status, batch.failed_at is None) == ("failed", False)
            (error,) = batch.errors.data
            assert (error.code, error.line, error.param) == (code, 3, param)
            assert server.requests() == []
            assert batch.output_file_id is None

    run(main())


def test_all_bad_lines_are_named(run, batching, official):
    async def main():
        async with batching(max_batch_lines=3) as server:
            client = official(server)
            batch = await ended(server, client, await begun(client, b"x", chat_line("a"), b"y"))
            assert [(error.line, error.code) for error in batch.errors.data] == [
                (1, "invalid_json_line"),
                (3, "invalid_json_line"),
            ]
            long = await ended(server, client, await begun(client, *(chat_line(f"{n}") for n in range(4))))
            assert [(error.line, error.code) for error in long.errors.data] == [(4, "too_many_requests")]
            empty = await ended(server, client, await begun(client, b"", b" "))
            assert [(error.line, error.code) for error in empty.errors.data] == [(None, "empty_file")]

    run(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"model": "other"}, "model"),
        ({"messages": 7}, "messages"),
        ({"max_token": 3}, "max_token"),
    ],
)
def test_a_bad_request_is_an_error_line(run, batching, official, body, param):
    async def main():
        async with batching() as server:
            client = official(server)
            batch = await ended(server, client, await begun(client, chat_line("bad", **body), chat_line("good")))
            assert batch.status == "completed"
            assert set(await lines_of(client, batch.output_file_id)) == {"good"}
            line = (await lines_of(client, batch.error_file_id))["bad"]
            assert line["response"]["body"]["error"]["param"] == param

    run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"endpoint": "/v1/batches"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"x" * 65: "y"}}, "metadata"),
        ({"metadata": {f"{n}": "y" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
def test_fields_are_checked(run, batching, official, fields, param):
    async def main():
        async with batching() as server:
            with pytest.raises(openai.BadRequestError) as caught:
                await begun(official(server), chat_line("a"), **fields)
            assert caught.value.param == param

    run(main())


def test_an_input_must_be_there(run, batching, official):
    async def main():
        async with batching() as server:
            client = official(server)
            fields = {"endpoint": CHAT, "completion_window": "24h"}
            for name in ("file-none", "../../etc/passwd", "file-" + "0" * 32):
                with pytest.raises(openai.NotFoundError):
                    await client.batches.create(input_file_id=name, **fields)
            done = await ended(server, client, await begun(client, chat_line("a")))
            with pytest.raises(openai.BadRequestError) as caught:
                await client.batches.create(input_file_id=done.output_file_id, **fields)
            assert caught.value.code == "invalid_file_purpose"

    run(main())


def test_a_file_that_is_read_cannot_be_deleted(run, batching, official):
    async def main():
        async with batching() as server:
            client = official(server)
            server.fake.hold(1)
            batch = await begun(client, chat_line("a"))
            with pytest.raises(openai.ConflictError) as caught:
                await client.files.delete(batch.input_file_id)
            assert caught.value.code == "file_in_use"
            server.fake.release()
            await ended(server, client, batch)
            assert (await client.files.delete(batch.input_file_id)).deleted

    run(main())


def test_cancelling_aborts_what_runs_and_keeps_what_is_done(run, batching, official):
    async def main():
        async with batching(max_batch_concurrency=2) as server:
            client = official(server)
            server.fake.reply_to = lambda request, index: "no" if len(request.prompt_token_ids) < 30 else "y" * 500
            server.fake.hold(5)
            batch = await begun(client, chat_line("short"), *(chat_line(f"long{n}", "x" * 40) for n in range(5)))
            while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
                await asyncio.sleep(0)
            await reached(server, 2)
            cancelling = await client.batches.cancel(batch.id)
            assert (cancelling.status, cancelling.cancelling_at is None) == ("cancelling", False)
            batch = await ended(server, client, batch)
            assert (batch.status, batch.cancelled_at is None) == ("cancelled", False)
            assert len(server.fake.aborted) == 2
            assert set(await lines_of(client, batch.output_file_id)) == {"short"}
            rest = await lines_of(client, batch.error_file_id)
            assert {name: line["error"]["code"] for name, line in rest.items()} == {
                f"long{n}": "batch_cancelled" for n in range(5)
            }
            assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 5)
            with pytest.raises(openai.ConflictError):
                await client.batches.cancel(batch.id)

    run(main())


def test_a_batch_ends_with_its_window(run, batching, official):
    async def main():
        async with batching() as server:
            client = official(server)
            server.fake.hold(1)
            batch = await begun(client, chat_line("a"), completion_window="1m")
            job = server.services.batches._jobs[batch.id]
            await reached(server, 1)
            job.expire()
            batch = await ended(server, client, batch)
            assert (batch.status, batch.expired_at is None) == ("expired", False)
            line = (await lines_of(client, batch.error_file_id))["a"]
            assert line["response"] is None
            assert line["error"]["code"] == "batch_expired"

    run(main())


def test_a_restart_goes_on_where_the_results_end(run, batching, official, tmp_path):
    """What was written is not computed twice; a line that the crash has cut is."""

    async def main():
        async with batching(max_batch_concurrency=1) as server:
            client = official(server)
            batches = server.services.batches
            server.fake.reply_to = lambda request, index: "ok" if len(server.requests()) <= 3 else "x" * 400
            server.fake.hold(50)
            batch = await begun(client, *(chat_line(f"r{n}") for n in range(6)))
            while (await client.batches.retrieve(batch.id)).request_counts.completed < 3:
                await asyncio.sleep(0)
            record = batches._jobs[batch.id].record
            # as a crash leaves it: the row says in_progress, and the last line is torn
            await batches.stop()
            path = server.services.files.path_of(record.good_file_id)
            with path.open("ab") as file:
                file.write(b'{"id": "batch_req_0", "custom_id": "r5", "resp')
            num_before = len(server.requests())
            server.fake.reply_to = lambda request, index: "again"
            server.fake.release()
            await batches.start()
            batch = await ended(server, client, batch)
            assert batch.status == "completed"
            assert batch.request_counts.completed == batch.request_counts.total == 6
            answers = await lines_of(client, batch.output_file_id)
            said = [answers[f"r{n}"]["response"]["body"]["choices"][0]["message"]["content"] for n in range(6)]
            assert said == ["ok"] * 3 + ["again"] * 3
            assert len(server.requests()) - num_before == 3

    run(main())


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
def test_every_state_is_resumed(run, batching, official, status):
    async def main():
        async with batching() as server:
            client = official(server)
            batch = await begun(client, chat_line("a"), chat_line("b"))
            batches = server.services.batches
            record = batches._jobs[batch.id].record
            await batches.stop()
            record.batch.status = type(record.batch.status)(status)
            if status != "validating":
                record.batch.in_progress_at = record.batch.created_at
                record.batch.request_counts.total = 2
            if status == "finalizing":
                results = Results(
                    *(server.services.files.path_of(one) for one in (record.good_file_id, record.bad_file_id))
                )
                called = await batches._shop.runner.calls.call(CHAT, json.dumps(chat_line("a")["body"]).encode())
                for name in ("a", "b"):
                    results.append(answered(name, called))
                results.close()
            await batches._shop.records.update(record)
            await batches.start()
            batch = await ended(server, client, batch)
            assert batch.status == ("cancelled" if status == "cancelling" else "completed")
            assert batch.request_counts.completed + batch.request_counts.failed == 2

    run(main())


def test_one_process_runs_the_batches_of_a_folder(run, batching, official):
    async def main():
        async with batching() as first:
            await ended(first, official(first), await begun(official(first), chat_line("a")))
            async with batching() as second:
                with pytest.raises(openai.InternalServerError, match="Another server") as caught:
                    await begun(official(second), chat_line("b"))
                assert caught.value.status_code == 503

    run(main())


@pytest.fixture
def sharing(served, tmp_path):
    """As `batching`, of servers with one folder and one database."""
    folder = str(tmp_path / "files")
    return lambda: served(files_folder=folder, storage_url=f"sqlite:///{tmp_path / 'server.db'}")


def test_the_batches_of_a_server_that_died_are_taken_over(run, sharing, official):
    async def main():
        async with sharing() as first, sharing() as second:
            first.fake.hold(2)
            batch = await begun(official(first), chat_line("a"), chat_line("b"))
            await reached(first, 2)
            # as long as it lives they are its own, and it is no fault that they are
            await second.services.look_after()
            assert second.services.batches._jobs == {}
            await first.services.stop()
            await second.services.look_after()
            batch = await ended(second, official(second), batch)
            assert (batch.status, batch.request_counts.completed) == ("completed", 2)
            assert not first.fake.running

    run(main())


@pytest.mark.parametrize("document", ["{", "{}", '{"batch": {"status": "odd"}}', None], ids=repr)
def test_a_row_that_is_broken_holds_up_no_other(run, sharing, official, document, caplog):
    async def main():
        async with sharing() as server:
            client = official(server)
            server.fake.hold(4)
            bad, good = [await begun(client, chat_line("a"), chat_line("b")) for _ in range(2)]
            await reached(server, 4)
            record = server.services.batches._jobs[bad.id].record
        async with sharing() as server:
            client = official(server)
            written = json.loads(msgspec.json.encode(record)) | {"good_file_id": "no id"}
            values = {"document": json.dumps(written) if document is None else document}
            change = BATCHES.update().where(BATCHES.c.id == bad.id).values(values)
            await server.services.storage.run(lambda connection: connection.execute(change))
            await server.services.look_after()
            assert bad.id in caplog.text
            assert (await ended(server, client, good)).request_counts.completed == 2
            seen = [batch.id for batch in (await client.batches.list()).data]
            assert seen == ([good.id] if document is not None else [good.id, bad.id])

    run(main())


def test_not_now_is_no_answer(run, batching, official, monkeypatch):
    """An overload and an engine that starts again are waited for; a request that kills each engine gets an error."""

    async def main():
        async with batching() as server:
            client = official(server)
            shop = server.services.batches._shop
            waits = []

            async def sleep(seconds):
                waits.append(seconds)

            object.__setattr__(shop.runner, "sleep", sleep)
            genuine, num_calls = type(shop.runner.calls).call, {}

            async def call(self, path, body, tenant=""):
                content = json.loads(body)["messages"][0]["content"]
                num_calls[content] = num_calls.get(content, 0) + 1
                answer = await genuine(self, path, body, tenant)
                if content == "killer":
                    return type(answer)(500, answer.request_id, b'{"error":{"code":"engine_restarted"}}')
                if num_calls[content] <= 6:
                    # a full queue, and one that was too long
                    return type(answer)(429 if num_calls[content] % 2 else 503, answer.request_id, b"{}")
                return answer

            monkeypatch.setattr(type(shop.runner.calls), "call", call)
            batch = await ended(server, client, await begun(client, chat_line("a", "busy"), chat_line("b", "killer")))
            assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
            assert num_calls == {"busy": 7, "killer": 4}
            assert max(waits) <= 30
            line = (await lines_of(client, batch.error_file_id))["b"]
            assert line["response"]["status_code"] == 500

    run(main())


def test_a_full_disk_is_waited_for(run, batching, official, monkeypatch):
    """F15: a line is written wholly or not at all, and the batch goes on when there is room."""

    async def main():
        async with batching() as server:
            client = official(server)
            shop = server.services.batches._shop
            genuine, failures = Results.append, []

            def append(self, line):
                if len(failures) < 2:
                    failures.append(line)
                    raise OSError(28, "No space left on device")
                genuine(self, line)

            async def sleep(seconds):
                await asyncio.sleep(0)

            object.__setattr__(shop, "sleep", sleep)
            monkeypatch.setattr(Results, "append", append)
            batch = await ended(server, client, await begun(client, chat_line("a"), chat_line("b")))
            assert (batch.status, batch.request_counts.completed) == ("completed", 2)
            assert len(failures) == 2

    run(main())


def test_a_line_that_the_disk_cuts_is_taken_back(tmp_path, monkeypatch):
    from quire.interfaces.gateway.batches import results as module
    from quire.interfaces.gateway.batches.endpoint_calls import Called

    results = Results(tmp_path / "good", tmp_path / "bad")
    results.append(answered("a", Called(200, "req", msgspec.Raw(b"{}"))))
    whole = (tmp_path / "good").read_bytes()

    def cut(descriptor, data):
        module.os.write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_all", cut)
        with pytest.raises(OSError, match="No space"):
            results.append(answered("b", Called(200, "req", msgspec.Raw(b"{}"))))
    assert (tmp_path / "good").read_bytes() == whole
    assert results.tally.done == {"a"}
    results.append(answered("b", Called(200, "req", msgspec.Raw(b"{}"))))
    again = Results(tmp_path / "good", tmp_path / "bad")
    again.recover()
    assert again.tally.done == {"a", "b"}


def test_pages(run, batching, official):
    async def main():
        async with batching() as server:
            client = official(server)
            ids = [(await begun(client, chat_line("a"))).id for _ in range(3)]
            await asyncio.gather(*server.services.batches._tasks)
            assert [batch.id async for batch in client.batches.list(limit=2)] == ids[::-1]
            with pytest.raises(openai.NotFoundError):
                await client.batches.retrieve("batch_none")

    run(main())
