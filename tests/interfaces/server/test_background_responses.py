"""Responses in the background: polled, cancelled, deleted, refused; and a server that ends while it makes one."""

import asyncio

import openai
import pytest
import sqlalchemy as sa

from quire.interfaces.gateway.responses import background
from quire.interfaces.gateway.responses.stored import BEAT_SECONDS_LOST, RESPONSES, StoredResponses

BODY = {"input": "Hi", "background": True}


async def made(server, **fields) -> dict:
    answer = await server.post("/v1/responses", {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def seen(server, response_id: str) -> dict:
    return (await server.http.get(f"/v1/responses/{response_id}")).json()


async def until(server, condition) -> None:
    """Until the fake engine's state fulfils it."""
    while not condition():
        server.fake.changed.clear()
        await server.fake.changed.wait()


async def over(server, response_id: str) -> dict:
    """The response when its task has ended."""
    running = server.services.background_responses._running.get(response_id)
    if running is not None:
        await asyncio.wait({running.task})
    return await seen(server, response_id)


def test_one_is_looked_at_until_it_is_completed(run, served):
    async def main():
        async with served() as server:
            client = openai.AsyncOpenAI(
                base_url="http://quire.test/v1", api_key="none", http_client=server.http, max_retries=0,
                _strict_response_validation=True,
            )  # fmt: skip
            server.fake.hold(3)
            response = await client.responses.create(model="byte-model", input="Hi", background=True)
            assert (response.status, response.background, response.output) == ("queued", True, [])
            await until(server, lambda: server.fake.running)
            while response.status == "queued":
                response = await client.responses.retrieve(response.id)
            assert (response.status, response.output) == ("in_progress", [])
            # nobody can follow what is not there yet
            with pytest.raises(openai.BadRequestError, match="this response is in_progress"):
                await client.responses.create(input="Two", previous_response_id=response.id)
            server.fake.release()
            await over(server, response.id)
            response = await client.responses.retrieve(response.id)
            assert response.status == "completed"
            assert response.output_text == server.texts(1, response.usage.input_tokens)[0]
            await client.responses.create(input="Two", previous_response_id=response.id)
            # one that is over stays as it is
            assert await client.responses.cancel(response.id) == response

    run(main())


def test_one_is_cancelled(run, served):
    async def main():
        async with served() as server:
            server.fake.hold(3)
            response = await made(server)
            await until(server, lambda: server.fake.running)
            answer = await server.post(f"/v1/responses/{response['id']}/cancel", {})
            assert answer.json()["status"] == "cancelled"
            assert answer.json()["error"] is None
            assert await seen(server, response["id"]) == answer.json()
            await until(server, lambda: server.fake.aborted)
            assert len(server.state.in_flight) == 0
            counted = 'quire:requests_aborted_total{kind="cancelled",'
            assert counted in (await server.http.get("/metrics")).text

    run(main())


def test_one_that_is_deleted_is_made_no_more(run, served):
    async def main():
        async with served() as server:
            server.fake.hold(3)
            response = await made(server)
            await until(server, lambda: server.fake.running)
            assert (await server.http.delete(f"/v1/responses/{response['id']}")).status_code == 200
            await until(server, lambda: server.fake.aborted)
            answer = await over(server, response["id"])
            assert answer["error"]["code"] == "response_not_found"

    run(main())


@pytest.mark.parametrize("at", [0, 3])
def test_one_fails(run, served, at):
    async def main():
        async with served() as server:
            server.fake.failures[at] = "broken"
            found = await over(server, (await made(server))["id"])
            assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
            assert len(found["output"]) == (1 if at else 0)

    run(main())


@pytest.mark.parametrize(("fields", "param"), [({"stream": True}, "stream"), ({"store": False}, "store")])
def test_what_does_not_go_together(run, served, fields, param):
    async def main():
        async with served() as server:
            answer = await server.post("/v1/responses", {**BODY, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    run(main())


def test_a_server_that_stops_says_so(run, served, tmp_path):
    """Which the end of `served` does: it fails at once, and is found so after the restart."""
    storage = f"sqlite:///{tmp_path}/server.db"

    async def main():
        async with served(storage_url=storage) as server:
            server.fake.hold(3)
            response = await made(server)
            await until(server, lambda: server.fake.running)
        async with served(storage_url=storage) as server:
            found = await seen(server, response["id"])
            assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
            assert "stopped" in found["error"]["message"]

    run(main())


def test_a_server_that_is_killed_leaves_nothing_that_seems_to_go_on(run, served, tmp_path):
    storage = f"sqlite:///{tmp_path}/server.db"

    async def main():
        async with served(storage_url=storage) as server, served(storage_url=storage) as other:
            server.fake.hold(3)
            response = await made(server)
            path = f"/v1/responses/{response['id']}"
            # somebody else's, who may be at it: as long as there are beats
            assert (await seen(other, response["id"]))["status"] in ("queued", "in_progress")
            now = other.services.storage.clock()
            other.services.storage.clock = lambda: now + BEAT_SECONDS_LOST + 1
            found = await seen(other, response["id"])
            assert (found["status"], found["error"]["message"]) == (
                "failed",
                "The server was stopped while it made this response.",
            )
            assert (await other.http.delete(path)).status_code == 200

    run(main())


def test_another_server_can_cancel_it(run, served, tmp_path, monkeypatch):
    storage = f"sqlite:///{tmp_path}/server.db"
    monkeypatch.setattr(background, "BEAT_SECONDS", 0.01)

    async def main():
        async with served(storage_url=storage) as server, served(storage_url=storage) as other:
            server.fake.hold(3)
            response = await made(server)
            await until(server, lambda: server.fake.running)
            path = f"/v1/responses/{response['id']}/cancel"
            # It is the other server that runs it, so the answer may come before the end or after it.
            assert (await other.post(path, {})).json()["status"] in ("queued", "in_progress", "cancelled")
            await until(server, lambda: server.fake.aborted)
            assert (await over(server, response["id"]))["status"] == "cancelled"
            assert (await seen(other, response["id"]))["status"] == "cancelled"

    run(main())


def test_a_heart_that_stumbles_beats_on(run, served, monkeypatch, caplog):
    """A mistake of ours in one beat, and not of the database, which is another kind of failure."""
    monkeypatch.setattr(background, "BEAT_SECONDS", 0.001)
    beats = []

    async def main():
        async with served() as server:
            beat = StoredResponses.beat

            async def stumbling(self, ids):
                beats.append(ids)
                if len(beats) == 1:
                    raise ValueError("a mistake")
                return await beat(self, ids)

            monkeypatch.setattr(StoredResponses, "beat", stumbling)
            server.fake.hold(3)
            response = await made(server)
            await until(server, lambda: server.fake.running)
            while len(beats) < 3:
                await asyncio.sleep(0)
            assert "a mistake" in caplog.text
            server.fake.release()
            assert (await over(server, response["id"]))["status"] == "completed"

    run(main())


def test_its_room_is_that_of_the_whole_answer(run, served):
    async def main():
        async with served() as server:
            response = await over(server, (await made(server))["id"])
            query = sa.select(RESPONSES.c.num_bytes, RESPONSES.c.body, RESPONSES.c["items"])
            row = await server.services.storage.run(lambda connection: connection.execute(query).one())
            assert response["status"] == "completed"
            assert row.num_bytes == len(row.body) + len(row[2])

    run(main())


def test_there_is_no_room_for_any_number(run, served):
    async def main():
        async with served(max_num_queued_requests=1) as server:
            server.fake.hold(0)
            first = await made(server)
            answer = await server.post("/v1/responses", BODY)
            assert answer.status_code == 429
            assert answer.headers["retry-after"]
            await server.post(f"/v1/responses/{first['id']}/cancel", {})
            # its place is free
            server.fake.release()
            assert (await over(server, (await made(server))["id"]))["status"] == "completed"

    run(main())
