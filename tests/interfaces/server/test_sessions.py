"""/v1/sessions over a core without a model that keeps what it is told to keep; greedy answers repeat the prompt."""

import asyncio
import contextlib

import httpx2 as httpx
import pytest

from quire.engine_client import AsyncEngineClient
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.gateway import create_app
from quire.interfaces.gateway.sessions.kept_session import shared_length
from quire.interfaces.session import AsyncSession
from quire.testing.fake_kept import KEEPING_CORE
from quire.testing.fake_llm import fake_async_llm

GREEDY = {"temperature": 0, "max_tokens": 6}


class Server:
    """Requests go straight into an application."""

    def __init__(self, engine, **limits) -> None:
        self.engine = engine
        self.app = create_app(engine, **limits)
        self.sessions = self.app.state.services.sessions
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://quire.test")

    async def ask(self, method, path="", status=200, **body):
        answer = await self.http.request(method, f"/v1/sessions{path}", **({"json": body} if method == "POST" else {}))
        assert answer.status_code == status, answer.text
        return answer.json()

    async def opened(self, **fields):
        return (await self.ask("POST", status=201, **fields))["id"]

    async def say(self, session_id, content="Hello", status=200, **fields):
        messages = [{"role": "user", "content": content}]
        return await self.ask("POST", f"/{session_id}/messages", status, **{"messages": messages, **GREEDY, **fields})

    async def go_on(self, session_id, prompt="Once", status=200, **fields):
        return await self.ask("POST", f"/{session_id}/completions", status, **{"prompt": prompt, **GREEDY, **fields})

    async def computed(self):
        return (await self.engine.statistics())["tokens_computed_total"]


@pytest.fixture
def keeping():
    """`async with keeping(...) as server`; keywords are options of the server."""

    @contextlib.asynccontextmanager
    async def make(**limits):
        engine = fake_async_llm(core=KEEPING_CORE)
        await engine.start()
        server = Server(engine, **limits)
        try:
            async with server.http:
                yield server
        finally:
            await server.app.state.services.stop()
            engine.shutdown()

    return make


def content_of(answer):
    return answer["choices"][0]["message"]["content"]


def code_of(answer):
    return answer["error"]["code"]


def test_a_life(run, keeping):
    async def main():
        async with keeping() as server:
            session = await server.ask("POST", status=201)
            assert (session["object"], session["kind"], session["num_tokens"], session["num_blocks"]) == (
                "session", None, 0, 0
            )  # fmt: skip
            name = session["id"]
            first = await server.say(name)
            assert first["object"] == "chat.completion"
            used = first["usage"]
            session = await server.ask("GET", f"/{name}")
            assert (session["kind"], session["status"], session["num_turns"]) == ("chat", "idle", 1)
            assert session["num_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
            assert session["num_blocks"] > 0
            assert [one["id"] for one in (await server.ask("GET"))["data"]] == [name]
            assert await server.ask("DELETE", f"/{name}") == {"id": name, "object": "session.deleted", "deleted": True}
            assert await server.engine.control("list_kept") == []
            assert code_of(await server.ask("GET", f"/{name}", 404)) == "session_closed"
            assert (await server.ask("GET"))["data"] == []

    run(main())


def test_a_turn_computes_only_what_is_new(run, keeping):
    async def main():
        async with keeping() as server:
            name = await server.opened()
            for content in ("Hello", "and then", "and so on"):
                num_kept, before = (await server.ask("GET", f"/{name}"))["num_tokens"], await server.computed()
                usage = (await server.say(name, content))["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                new = usage["prompt_tokens"] + usage["completion_tokens"] - cached
                assert await server.computed() - before == new - 1
                assert (cached > 0) == (num_kept > 0)

    run(main())


def test_answers_are_those_of_the_chat_sent_whole(run, keeping):
    """Also as a stream, and after a turn that ended by its length or a stop string."""

    async def main():
        async with keeping() as server:
            name, messages = await server.opened(), []
            turns = [{}, {"max_tokens": 3}, {"stop": ["e"]}, {"max_tokens": 30}, {"logprobs": True, "top_logprobs": 2}]
            for number, fields in enumerate(turns):
                messages.append({"role": "user", "content": f"Question {number}, please."})
                whole = await server.http.post("/v1/chat/completions", json={"messages": messages, **GREEDY, **fields})
                turn = await server.say(name, messages[-1]["content"], **fields)
                assert turn["choices"] == whole.json()["choices"]
                assert turn["usage"]["prompt_tokens"] == whole.json()["usage"]["prompt_tokens"]
                messages.append({"role": "assistant", "content": content_of(turn)})

    run(main())


def test_a_streamed_turn(run, keeping, events_of):
    async def main():
        async with keeping() as server:
            whole, streamed = await server.opened(), await server.opened()
            for content in ("Hello", "again"):
                expected = content_of(await server.say(whole, content))
                body = {"messages": [{"role": "user", "content": content}], **GREEDY, "stream": True}
                answer = await server.http.post(
                    f"/v1/sessions/{streamed}/messages", json={**body, "stream_options": {"include_usage": True}}
                )
                events = events_of(answer.text)
                assert {event["object"] for event in events} == {"chat.completion.chunk"}
                pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
                assert "".join(pieces) == expected
                assert events[-1]["usage"]["completion_tokens"] > 0
            assert (await server.ask("GET", f"/{whole}"))["turns"] == (await server.ask("GET", f"/{streamed}"))["turns"]

    run(main())


def test_a_text(run, keeping):
    async def main():
        async with keeping() as server:
            name = await server.opened()
            text = "one two"
            for prompt in (text, " three", "", [5, 6, 7]):
                turn = await server.go_on(name, prompt)
                assert turn["object"] == "text_completion"
            session = await server.ask("GET", f"/{name}")
            assert (session["kind"], session["num_turns"]) == ("text", 4)
            # a greedy answer repeats the whole from its beginning: the kept tokens were there
            kept = server.sessions.find(name, "").engine_session.token_ids
            assert kept[-6:] == kept[:6]
            assert code_of(await server.say(name, status=409)) == "session_kind"
            chat = await server.opened()
            await server.say(chat)
            assert code_of(await server.go_on(chat, status=409)) == "session_kind"

    run(main())


def test_a_fork_goes_its_own_way(run, keeping):
    async def main():
        async with keeping() as server:
            name = await server.opened()
            await server.say(name)
            fork = await server.ask("POST", f"/{name}/fork", 201)
            assert fork["forked_from"] == name
            before = await server.ask("GET", f"/{name}")
            assert (fork["num_tokens"], fork["turns"]) == (before["num_tokens"], before["turns"])
            computed = await server.computed()
            usage = (await server.say(fork["id"], "another way"))["usage"]
            new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] + usage["completion_tokens"]
            assert await server.computed() - computed == new - 1
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0
            assert (await server.ask("GET", f"/{name}"))["num_tokens"] == before["num_tokens"]
            await server.ask("DELETE", f"/{name}")
            assert (await server.ask("GET", f"/{fork['id']}"))["num_turns"] == 2

    run(main())


def test_rewinding(run, keeping):
    async def main():
        async with keeping() as server:
            name = await server.opened()
            first = await server.say(name, "one")
            after_first = await server.ask("GET", f"/{name}")
            second = await server.say(name, "two")
            after_second = await server.ask("GET", f"/{name}")
            rewound = await server.ask("POST", f"/{name}/rewind", num_turns=1)
            assert rewound["num_tokens"] == after_first["num_tokens"]
            assert rewound["num_blocks"] == after_first["num_blocks"] <= after_second["num_blocks"]
            assert content_of(await server.say(name, "two")) == content_of(second)
            rewound = await server.ask("POST", f"/{name}/rewind", num_tokens=after_first["num_tokens"])
            assert rewound["turns"] == after_first["turns"]
            empty = await server.ask("POST", f"/{name}/rewind", num_turns=0)
            assert (empty["num_tokens"], empty["num_blocks"]) == (0, 0)
            assert content_of(await server.say(name, "one")) == content_of(first)
            for fields in (
                {},
                {"num_turns": 1, "num_tokens": 1},
                {"num_turns": 2},
                {"num_turns": -1},
                {"num_tokens": 3},
            ):
                answer = await server.ask("POST", f"/{name}/rewind", 400, **fields)
                assert answer["error"]["param"] in ("num_turns", "num_tokens")

    run(main())


def test_a_text_is_rewound_to_any_token(run, keeping):
    async def main():
        async with keeping() as server:
            name = await server.opened()
            await server.go_on(name, "one two three")
            for num_tokens in (5, 1):
                rewound = await server.ask("POST", f"/{name}/rewind", num_tokens=num_tokens)
                assert (rewound["num_tokens"], rewound["num_turns"]) == (num_tokens, 0)
            await server.ask("POST", f"/{name}/rewind", 400, num_tokens=2)

    run(main())


def test_a_turn_that_is_refused_changes_nothing(run, keeping):
    async def main():
        async with keeping() as server:
            name = await server.opened()
            await server.say(name)
            before = await server.ask("GET", f"/{name}")
            await server.say(name, "x" * 100_000, status=400)
            await server.say(name, temperature=-1, status=400)
            await server.say(name, response_format={"type": "json_schema"}, status=400)
            after = await server.ask("GET", f"/{name}")
            assert (after["turns"], after["num_tokens"]) == (before["turns"], before["num_tokens"])
            assert after["status"] == "idle"

    run(main())


def test_opening_and_forking_need_no_body_and_take_no_unknown_field(run, keeping):
    async def main():
        async with keeping() as server:
            name = (await server.http.post("/v1/sessions")).json()["id"]
            assert (await server.http.post(f"/v1/sessions/{name}/fork")).json()["forked_from"] == name
            for field, words in (("num_turns", "rewind it afterwards"), ("cache_salt", "when you open"), ("x", "'x'")):
                answer = await server.ask("POST", f"/{name}/fork", 400, **{field: 1})
                assert words in answer["error"]["message"]
            assert len((await server.ask("GET"))["data"]) == 2

    run(main())


def test_one_turn_at_a_time(run, keeping):
    async def main():
        async with keeping() as server:
            name = await server.opened()
            kept = server.sessions.find(name, "")
            with kept.claimed():
                assert (await server.ask("GET", f"/{name}"))["status"] == "busy"
                for path, body in (
                    ("messages", {"messages": [{"role": "user", "content": "x"}]}),
                    ("completions", {"prompt": "x"}),
                    ("fork", {}),
                    ("rewind", {"num_turns": 0}),
                ):
                    answer = await server.ask("POST", f"/{name}/{path}", 409, **body)
                    assert code_of(answer) == "session_busy", path
                    assert "Wait for its end" in answer["error"]["message"]
            answers = await asyncio.gather(*(
                server.http.post(
                    f"/v1/sessions/{name}/messages", json={"messages": [{"role": "user", "content": "x"}], **GREEDY}
                )
                for _ in range(4)
            ))  # fmt: skip
            good = [answer for answer in answers if answer.status_code == 200]
            assert {answer.status_code for answer in answers} <= {200, 409}
            assert len(good) == (await server.ask("GET", f"/{name}"))["num_turns"] >= 1

    run(main())


def test_a_turn_whose_session_is_closed_meanwhile_says_so(run, keeping, monkeypatch):
    async def main():
        async with keeping() as server:
            name = await server.opened()

            opened = AsyncSession.open

            async def closed_meanwhile(session, prompt, params, observer, **more):
                generation = await opened(session, prompt, params, observer, **more)
                await server.ask("DELETE", f"/{name}")
                aborted = OutputDelta(0, [], finish_reason="abort")
                monkeypatch.setattr(generation, "take", lambda: observer.see(aborted))
                return generation

            monkeypatch.setattr(AsyncSession, "open", closed_meanwhile)
            assert code_of(await server.say(name, status=404)) == "session_closed"

    run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 1}, {"priority": 1}, {"cache_salt": "x"},
        {"continue_final_message": True}, {"add_generation_prompt": False}, {"messages": []}, {"max_token": 3},
    ],
)  # fmt: skip
def test_what_a_turn_does_not_take(run, keeping, fields):
    async def main():
        async with keeping() as server:
            name = await server.opened()
            answer = await server.say(name, status=400, **fields)
            assert answer["error"]["param"] == next(iter(fields))
            assert (await server.ask("GET", f"/{name}"))["num_turns"] == 0

    run(main())


def test_bounds(run, keeping):
    async def main():
        async with keeping(max_sessions=2, max_session_tokens=40) as server:
            first, second = await server.opened(), await server.opened()
            assert code_of(await server.ask("POST", status=429)) == "session_limit"
            assert code_of(await server.ask("POST", f"/{first}/fork", 429)) == "session_limit"
            await server.ask("DELETE", f"/{second}")
            while (await server.ask("GET", f"/{first}"))["num_tokens"] < 40:
                await server.say(first)
            assert code_of(await server.say(first, status=429)) == "session_limit"
            assert code_of(await server.ask("POST", f"/{first}/fork", 429)) == "session_limit"
            await server.ask("POST", f"/{first}/rewind", num_turns=0)
            await server.say(first)

    run(main())


def test_what_nobody_uses_ends(run, keeping):
    async def main():
        async with keeping(session_idle_timeout=60) as server:
            now = [0.0]
            server.sessions._clock = lambda: now[0]
            used, idle = await server.opened(), await server.opened()
            await server.say(idle)
            now[0] = 50.0
            await server.say(used)
            now[0] = 70.0
            assert (await server.ask("GET", f"/{used}"))["expires_in_seconds"] == 60
            assert [one["id"] for one in (await server.ask("GET"))["data"]] == [used]
            assert code_of(await server.say(idle, status=404)) == "session_expired"
            await server.sessions.sweep()
            assert code_of(await server.ask("DELETE", f"/{idle}", 404)) == "session_expired"
            assert len(await server.engine.control("list_kept")) == 1
            assert code_of(await server.ask("GET", "/sess_none", 404)) == "session_not_found"

    run(main())


def test_idle_sessions_are_closed_without_being_asked_for(run, keeping):
    async def main():
        async with keeping(session_idle_timeout=1) as server:
            await server.say(await server.opened())
            while await server.engine.control("list_kept"):
                await asyncio.sleep(0.05)

    run(main())


def test_an_evicted_session_is_computed_again(run, keeping):
    async def main():
        async with keeping() as server:
            name, other = await server.opened(), await server.opened()
            await server.engine.control("evict_next", {"count": 1})
            await server.say(name)
            assert (await server.ask("GET", f"/{name}"))["num_blocks"] == 0
            await server.say(other)
            assert content_of(await server.say(name, "go on")) == content_of(await server.say(other, "go on"))
            assert (await server.ask("GET", f"/{name}"))["num_blocks"] > 0

    run(main())


def test_tenants_do_not_see_each_other(run, keeping):
    async def main():
        async with keeping(max_sessions=1, api_keys=["one", "two"]) as server:
            server.http.headers["authorization"] = "Bearer one"
            name = await server.opened()
            transport, headers = httpx.ASGITransport(app=server.app), {"authorization": "Bearer two"}
            async with httpx.AsyncClient(transport=transport, base_url="http://quire.test", headers=headers) as other:
                assert (await other.get("/v1/sessions")).json()["data"] == []
                for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/fork")):
                    answer = await other.request(method, f"/v1/sessions/{name}{path}")
                    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
                # each has room of its own
                assert (await other.post("/v1/sessions", json={})).status_code == 201
                assert (await other.post("/v1/sessions", json={})).status_code == 429

    run(main())


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [
        ([], [], 0),
        ([], [1], 0),
        ([1], [], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 5, 3], [1, 2, 3], 1),
    ],
)
def test_the_shared_beginning(first, second, length):
    assert shared_length(first, second) == length


def test_the_engine_is_told_whose_session_it_is(run, keeping, monkeypatch):
    """So its turns have the tenant's share, and nobody else finds in the cache what was said. A fork is the same's."""

    async def main():
        async with keeping(api_keys=["one", "two"]) as server:
            told, send = [], AsyncEngineClient.open

            def spy(self, request):
                told.append(request.tenant)
                return send(self, request)

            monkeypatch.setattr(AsyncEngineClient, "open", spy)
            server.http.headers["authorization"] = "Bearer one"
            name = await server.opened()
            await server.say(name)
            await server.say((await server.ask("POST", f"/{name}/fork", 201))["id"])
            server.http.headers["authorization"] = "Bearer two"
            await server.say(await server.opened())
            first, of_fork, other = told
            assert first == of_fork != other
            assert first.cache_scope != other.cache_scope

    run(main())
