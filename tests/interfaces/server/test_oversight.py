"""What shows the work of all tenants: everybody's on a server of one, the administrator's where there are several."""

import httpx2 as httpx
import pytest

PATHS = ["/metrics", "/v1/observe/state", "/v1/observe/blocks", "/v1/observe/decisions", "/v1/observe/trace"]
TWO = {"api_keys": ["one", "two"]}


async def statuses(http: httpx.AsyncClient, key: str | None = None, **headers: str) -> dict[str, int]:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return {path: (await http.get(path, headers=headers)).status_code for path in PATHS}


def all_of(status: int) -> dict[str, int]:
    return dict.fromkeys(PATHS, status)


def test_nothing_changes_where_nobody_else_is(run, served):
    async def main():
        async with served() as server:
            assert await statuses(server.http) == all_of(200)
        async with served(api_keys=["one"]) as server:
            assert await statuses(server.http) == all_of(401)
            assert await statuses(server.http, "one") == all_of(200)

    run(main())


def test_two_keys_of_one_tenant_are_one_tenant(run, served, tmp_path):
    file = tmp_path / "keys"
    file.write_text("team: one\nteam: two\n")
    file.chmod(0o600)

    async def main():
        async with served(api_key_file=str(file)) as server:
            assert await statuses(server.http, "one") == all_of(200)
            assert await statuses(server.http, "two") == all_of(200)

    run(main())


def test_of_several_tenants_none_sees_what_the_others_do(run, served):
    async def main():
        async with served(**TWO) as server:
            assert await statuses(server.http) == all_of(401)
            assert await statuses(server.http, "one") == all_of(403)
            refused = await server.http.get("/metrics", headers={"authorization": "Bearer two"})
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("permission_error", "administrators_only")
            assert "admin_api_key" in error["message"]
            assert "admin_port" in error["message"]
            # whatever path it takes, nothing is told
            head = await server.http.head("/metrics", headers={"authorization": "Bearer two"})
            assert head.status_code == 403
            # what is a tenant's own goes on
            models = await server.http.get("/v1/models", headers={"authorization": "Bearer two"})
            assert models.json()["data"][0]["has_chat_template"] is True

    run(main())


def test_the_administrator_sees_it_with_the_key(run, served):
    async def main():
        async with served(**TWO, admin_api_key="root") as server:
            assert await statuses(server.http, "root") == all_of(200)
            assert await statuses(server.http, "one") == all_of(403)

    run(main())


@pytest.mark.parametrize("admin_key", [None, "root"])
def test_or_on_the_port_of_the_administrator(run, served, admin_key):
    async def main():
        async with served(**TWO, admin_port=0, admin_api_key=admin_key) as server:
            transport = httpx.ASGITransport(app=server.app.state.admin_app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9") as admin:
                assert await statuses(admin, admin_key) == all_of(200)
                # ordinary keys open nothing there, and a page that pretends to be there neither
                refused = await statuses(admin, "one", host="rebound.example")
                assert set(refused.values()) <= {401, 403}
            assert set((await statuses(server.http, "one")).values()) == {403}
            if admin_key:
                assert set((await statuses(server.http, admin_key)).values()) == {401}

    run(main())
