"""Stored responses on a fake engine: where they lie, whose they are, and a disk that is full."""

import json

METADATA = {f"key {number}": "z" * 512 for number in range(16)}


def test_the_default_file_is_made_when_something_is_stored(run, served, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    async def main():
        async with served(storage_url=None) as server:
            body = {"input": "Hi", "store": False}
            assert (await server.post("/v1/responses", body)).status_code == 200
            assert not (tmp_path / "quire").exists()
            assert (await server.post("/v1/responses", {"input": "Hi"})).status_code == 200
            assert (tmp_path / "quire" / "server.db").exists()

    run(main())


def test_a_conversation_goes_on_after_a_restart(run, served, tmp_path):
    storage = f"sqlite:///{tmp_path}/server.db"

    async def main():
        async with served(storage_url=storage) as server:
            first = (await server.post("/v1/responses", {"input": "One"})).json()
        async with served(storage_url=storage) as server:
            path = f"/v1/responses/{first['id']}"
            assert (await server.http.get(path)).json() == first
            body = {"input": "Two", "previous_response_id": first["id"]}
            assert (await server.post("/v1/responses", body)).json()["status"] == "completed"
            prompt = bytes(token for token in server.requests()[0].prompt_token_ids if token < 256).decode()
            assert prompt == f"One{first['output'][0]['content'][0]['text']}Two"
            assert (await server.http.delete(path)).json()["deleted"]
        async with served(storage_url=storage) as server:
            assert (await server.http.get(path)).status_code == 404

    run(main())


def test_two_tenants_do_not_see_each_other(run, served):
    async def main():
        async with served(api_keys=["red", "blue"]) as server:
            red, blue = ({"authorization": f"Bearer {name}"} for name in ("red", "blue"))
            made = (await server.http.post("/v1/responses", json={"input": "Hi"}, headers=red)).json()["id"]
            for method, path in (
                ("GET", f"/v1/responses/{made}"),
                ("GET", f"/v1/responses/{made}/input_items"),
                ("DELETE", f"/v1/responses/{made}"),
                ("POST", f"/v1/responses/{made}/cancel"),
            ):
                assert (await server.http.request(method, path, headers=blue)).status_code == 404
            body = {"input": "Hi", "previous_response_id": made}
            answer = await server.http.post("/v1/responses", json=body, headers=blue)
            assert answer.json()["error"]["code"] == "previous_response_not_found"
            assert (await server.http.get(f"/v1/responses/{made}", headers=red)).status_code == 200

    run(main())


def test_a_full_disk_refuses_to_store_and_answers_the_rest(run, served):
    async def main():
        async with served() as server:
            storage = server.services.storage
            await storage.open()
            pages = await storage.run(lambda one: one.exec_driver_sql("PRAGMA page_count").scalar())
            await storage.run(lambda one: one.exec_driver_sql(f"PRAGMA max_page_count = {pages}"))
            body = {"input": "x" * 300}
            for _ in range(2):
                answer = await server.post("/v1/responses", {**body, "instructions": "y" * 90, "metadata": METADATA})
                assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")
                assert answer.headers["x-should-retry"] == "false"
            # the second was refused before it was computed
            assert len(server.requests()) == 1
            assert (await server.post("/v1/responses", {**body, "store": False})).status_code == 200
            assert (await server.chat()).status_code == 200

    run(main())


def test_a_stream_that_cannot_be_stored_says_so(run, served, events_of):
    async def main():
        async with served() as server:
            storage = server.services.storage
            await storage.open()
            pages = await storage.run(lambda one: one.exec_driver_sql("PRAGMA page_count").scalar())
            await storage.run(lambda one: one.exec_driver_sql(f"PRAGMA max_page_count = {pages}"))
            answer = await server.post("/v1/responses", {"input": "Hi", "stream": True, "metadata": METADATA})
            assert answer.status_code == 200
            *_, last, _ = answer.text.split("\n\n")
            assert last.startswith("event: response.failed\n")
            failed = json.loads(last.partition("data: ")[2])["response"]
            assert failed["error"]["code"] == "server_error"
            assert "storage" in failed["error"]["message"]

    run(main())
