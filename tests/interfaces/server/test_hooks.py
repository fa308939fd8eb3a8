"""Hooks under the four dialects, whole and streamed: what is held is in no byte that a client gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.hooks import Hook, HookedCall, HookedRequest, Refusal, SequenceTokens, Verdict
from quire.interfaces.hooks.banned_text import BannedText
from quire.renderer.output_formats import OutputFormats

SAID = "All is well, grüße 😀, but secret things follow."
SHOWN = "All is well, grüße 😀, but "


class OneByOne(BannedText):
    """The engine goes on when a token was judged."""

    ahead = 1


DIALECTS = ["chat", "completions", "messages", "responses"]
_MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 200}),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 200}),
    "messages": ("/v1/messages", {"model": "byte-model", "messages": _MESSAGES, "max_tokens": 200}),
    "responses": ("/v1/responses", {"model": "byte-model", "input": "Hi", "max_output_tokens": 200}),
}


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def whole_of(dialect: str, body: dict[str, Any]) -> tuple[str, str]:
    """(text, how it ended)."""
    match dialect:
        case "chat":
            [choice] = body["choices"]
            return choice["message"]["content"], choice["finish_reason"]
        case "completions":
            [choice] = body["choices"]
            return choice["text"], choice["finish_reason"]
        case "messages":
            return "".join(block.get("text", "") for block in body["content"]), body["stop_reason"]
    text = "".join(part["text"] for item in body["output"] for part in item["content"])
    return text, body["incomplete_details"]["reason"] if body["status"] == "incomplete" else body["status"]


def streamed_of(dialect: str, text: str) -> tuple[str, str]:
    found = events(text)
    match dialect:
        case "chat":
            choices = [event["choices"][0] for event in found]
            return "".join(one["delta"].get("content") or "" for one in choices), choices[-1]["finish_reason"]
        case "completions":
            choices = [event["choices"][0] for event in found]
            return "".join(one["text"] for one in choices), choices[-1]["finish_reason"]
        case "messages":
            deltas = [event["delta"] for event in found if "delta" in event]
            return "".join(one.get("text", "") for one in deltas), deltas[-1]["stop_reason"]
    pieces = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    return "".join(pieces), found[-1]["response"]["incomplete_details"]["reason"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_that_is_held_is_in_an_answer(run: Any, served: Any, dialect: str) -> None:
    path, body = BODIES[dialect]
    ended = "refusal" if dialect == "messages" else "content_filter"
    more = {"chat": {"logprobs": True}, "completions": {"logprobs": 1}}.get(dialect, {})

    async def main() -> None:
        async with served(hooks=[OneByOne(["secret"])]) as server:
            server.fake.reply_to = lambda request, index: SAID
            for fields in ({}, more):
                answer = await server.post(path, {**body, **fields})
                assert answer.status_code == 200, answer.text
                assert whole_of(dialect, answer.json()) == (SHOWN, ended)
                assert "secret" not in answer.text
                stream = await server.post(path, {**body, **fields, "stream": True})
                assert streamed_of(dialect, stream.text) == (SHOWN, ended)
                usage = answer.json()["usage"]
                assert (usage.get("completion_tokens") or usage["output_tokens"]) == len(SHOWN.encode())

            assert server.fake.running == set()

    run(main())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_that_offends_nobody_is_whole(run: Any, served: Any, dialect: str) -> None:
    path, body = BODIES[dialect]

    async def main() -> None:
        async with served(hooks=[OneByOne(["nowhere"])]) as hooked:
            hooked.fake.reply_to = lambda request, index: SAID
            assert whole_of(dialect, (await hooked.post(path, body)).json())[0] == SAID
            assert hooked.fake.core.statistics()["sequences_aborted"] == 0

    run(main())


class Picky(Hook):
    def on_admit(self, request: HookedRequest) -> Refusal | None:
        return Refusal(reason="this is not for us") if "Hi" in request.prompt else None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_refusal_is_an_error_of_the_client(run: Any, served: Any, dialect: str) -> None:
    path, body = BODIES[dialect]

    async def main() -> None:
        async with served(hooks=[Picky()]) as server:
            for fields in ({}, {"stream": True}):
                answer = await server.post(path, {**body, **fields})
                assert answer.status_code == 400
                assert "this is not for us" in answer.text
            assert server.requests() == []

    run(main())


def test_a_prompt_in_pieces_is_seen_whole_before_it_is_sent(run: Any, served: Any) -> None:
    lines = [{"max_tokens": 5}, {"text": "H"}, {"text": "i", "is_final": True}]

    async def main() -> None:
        async with served(hooks=[Picky()]) as server:
            content = "\n".join(json.dumps(line) for line in lines)
            headers = {"content-type": "application/x-ndjson"}
            answer = await server.http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 400, answer.text
            assert "this is not for us" in answer.text
            assert server.requests() == []

    run(main())


# ---- calls of tools --------------------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "delete")
]
CALLS = (
    'Wait. <tool_call>\n{"name": "delete", "arguments": {"path": "/"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
)


class Careful(Hook):
    def on_tool_call(self, call: HookedCall) -> HookedCall | Refusal | None:
        if call.name == "delete":
            return Refusal(reason="[not deleted]")
        city = json.loads(call.arguments)["city"]
        changed = json.dumps({"city": city.upper()})
        return HookedCall(request=call.request, index=call.index, name=call.name, arguments=changed)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}])
def test_calls_are_refused_and_changed(run: Any, served: Any, fields: dict[str, Any]) -> None:
    async def main() -> None:
        async with served(hooks=[Careful()]) as server:
            server.engine.renderer.output_formats = OutputFormats.choose((), tool="hermes")
            server.fake.reply_to = lambda request, index: CALLS
            body = {"messages": _MESSAGES, "tools": TOOLS, "max_tokens": 300, **fields}
            answer = await server.post("/v1/chat/completions", body)
            [choice] = answer.json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] == "Wait.[not deleted]"
            [call] = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"city": "ULM"}'}
            stream = await server.post("/v1/chat/completions", {**body, "stream": True})
            deltas = [event["choices"][0]["delta"] for event in events(stream.text)]
            calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
            assert {one["index"] for one in calls} == {0}
            assert "".join(one["function"]["arguments"] for one in calls) == '{"city": "ULM"}'
            for text in (answer.text, stream.text):
                assert "Ulm" not in text
                assert "path" not in text

    run(main())


class Refusing(Hook):
    def on_tool_call(self, call: HookedCall) -> Refusal:
        return Refusal(reason="")


class Allowing(Hook):
    def on_tool_call(self, call: HookedCall) -> None:
        return None


@pytest.mark.parametrize(("hook", "reason", "num_calls"), [(Refusing, "stop", 0), (Allowing, "tool_calls", 2)])
def test_all_calls_or_none(run: Any, served: Any, hook: Any, reason: str, num_calls: int) -> None:
    async def main() -> None:
        async with served(hooks=[hook()]) as server:
            server.engine.renderer.output_formats = OutputFormats.choose((), tool="hermes")
            server.fake.reply_to = lambda request, index: CALLS
            answer = await server.post(
                "/v1/chat/completions", {"messages": _MESSAGES, "tools": TOOLS, "max_tokens": 300, "n": 2}
            )
            for choice in answer.json()["choices"]:
                assert choice["finish_reason"] == reason
                assert len(choice["message"].get("tool_calls") or ()) == num_calls

    run(main())


class Broken(Hook):
    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        raise ValueError("one of those days")

    def on_tool_call(self, call: HookedCall) -> None:
        raise ValueError("another one")


def test_a_broken_hook_is_counted(run: Any, served: Any) -> None:
    async def main() -> None:
        async with served(hooks=[Broken()]) as server:
            answer = await server.chat(max_tokens=5)
            assert answer.json()["choices"][0]["finish_reason"] == "content_filter"
            metrics = (await server.http.get("/metrics")).text
            assert 'quire:hook_failures_total{model_name="byte-model"} 1.0' in metrics

    run(main())
