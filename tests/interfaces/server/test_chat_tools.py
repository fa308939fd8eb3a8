"""Tool calls and reasoning over HTTP: what the official client sees, whole and streamed, of a scripted answer."""

import json
import re

import openai
import pytest

from quire.renderer.output_formats import OutputFormats

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "f")
]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"😀\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = '{"city": "Zürich \\"😀\\""}'
WEATHER = {"name": "weather", "arguments": ARGUMENTS}
F = {"name": "f", "arguments": "{}"}


def set_up(server, answer: str, *, tool: str = "hermes", reasoning: str = "think") -> None:
    """Which parsers the server has, and what the model says."""
    server.engine.renderer.output_formats = OutputFormats.choose((), tool=tool, reasoning=reasoning)
    server.fake.reply_to = lambda request, index: answer


async def both(server, events_of, **fields) -> tuple[dict, list[dict]]:
    """The one choice of a whole answer, and the deltas of the same answer streamed, which must say the same."""
    whole = (await server.chat(**fields)).json()
    (choice,) = whole["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = events_of((await server.chat(**fields, **options)).text)
    assert last["usage"] == whole["usage"]
    deltas = [event["choices"][0] for event in events]
    assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    assert all(delta["finish_reason"] is None for delta in deltas[:-1])
    assert deltas[-1]["delta"] == {}
    assert joined([delta["delta"] for delta in deltas]) == without_ids(choice["message"])
    return choice, [delta["delta"] for delta in deltas]


def joined(deltas: list[dict]) -> dict:
    """A message out of its deltas, as clients put it together."""
    message = {"role": None, "content": "", "refusal": None}
    for delta in deltas:
        message["role"] = delta.get("role", message["role"])
        message["content"] += delta.get("content", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for name in ("reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["type"] == "function"
                assert call["function"]["arguments"] == ""
                calls.append(call["function"].copy())
            else:
                assert call.keys() == {"index", "function"}
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    if "tool_calls" in message or "reasoning" in message:
        message["content"] = message["content"] or None
    return message


def without_ids(message: dict) -> dict:
    if "tool_calls" not in message:
        return message
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    return {**message, "tool_calls": [call["function"] for call in message["tool_calls"]]}


def test_calls(run, served, events_of):
    async def main():
        async with served() as server:
            set_up(server, CALLS)
            choice, deltas = await both(server, events_of, tools=TOOLS)
            assert choice["finish_reason"] == "tool_calls"
            message = choice["message"]
            assert re.fullmatch("call_[0-9a-f]{24}", message["tool_calls"][0]["id"])
            calls = [WEATHER, F]
            assert without_ids(message) == {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
            assert json.loads(ARGUMENTS) == {"city": 'Zürich "😀"'}
            # the name comes before the arguments, and these come while they are written
            assert [delta["tool_calls"][0]["index"] for delta in deltas if "tool_calls" in delta][-1] == 1
            assert len([delta for delta in deltas if "tool_calls" in delta]) > 10

    run(main())


def test_thoughts_are_left_out(run, served, events_of):
    """They are counted all the same."""

    async def main():
        async with served() as server:
            set_up(server, f"<think>\nHm, <tool_call>?\n</think>\n\nLet me see.\n{CALLS}")
            shown = (await server.chat(tools=TOOLS)).json()
            choice, deltas = await both(server, events_of, tools=TOOLS, include_reasoning=False)
            message = without_ids(choice["message"])
            assert (message["content"], message["tool_calls"]) == ("Let me see.", [WEATHER, F])
            assert not any(name.startswith("reasoning") for part in (message, *deltas) for name in part)
            hidden = (await server.chat(tools=TOOLS, include_reasoning=False)).json()
            assert hidden["usage"] == shown["usage"]
            assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0

    run(main())


def test_thoughts_content_and_calls(run, served, events_of):
    async def main():
        async with served() as server:
            set_up(server, f"<think>\nHm, <tool_call>?\n</think>\n\nLet me see.\n{CALLS}")
            choice, _ = await both(server, events_of, tools=TOOLS)
            message = without_ids(choice["message"])
            assert (message["reasoning"], message["content"]) == ("Hm, <tool_call>?", "Let me see.")
            assert message["tool_calls"] == [WEATHER, F]
            # without tools calls are text, and thoughts are thoughts
            choice, _ = await both(server, events_of)
            assert choice["message"]["reasoning_content"] == "Hm, <tool_call>?"
            assert choice["message"]["content"] == f"Let me see.\n{CALLS}"
            assert choice["finish_reason"] == "stop"

    run(main())


@pytest.mark.parametrize(
    "answer", ["Plain. ", "", " Use <tool_call> like this: <tool_call>{}</tool_call>", "a <think>b</think>"]
)
def test_what_is_no_call_is_text(run, served, events_of, answer):
    async def main():
        async with served() as server:
            set_up(server, answer)
            choice, _ = await both(server, events_of, tools=TOOLS)
            assert choice["message"] == {"role": "assistant", "content": answer, "refusal": None}
            assert choice["finish_reason"] == "stop"

    run(main())


def test_one_call_at_most(run, served, events_of):
    async def main():
        async with served() as server:
            set_up(server, CALLS)
            choice, _ = await both(server, events_of, tools=TOOLS, parallel_tool_calls=False)
            assert without_ids(choice["message"])["tool_calls"] == [WEATHER]
            choice, _ = await both(server, events_of, tools=TOOLS, parallel_tool_calls=True)
            assert without_ids(choice["message"])["tool_calls"] == [WEATHER, F]

    run(main())


def test_no_choice_of_tools(run, served, events_of):
    async def main():
        async with served() as server:
            set_up(server, CALLS)
            choice, _ = await both(server, events_of, tools=TOOLS, tool_choice="none")
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")

    run(main())


CHOICE_F = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("wish", ["required", CHOICE_F])
def test_a_call_is_enforced(run, served, events_of, wish):
    """The form reaches the engine; the fake says a call of its own accord."""

    async def main():
        async with served() as server:
            set_up(server, CALLS if wish == "required" else '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
            choice, _ = await both(server, events_of, tools=TOOLS, tool_choice=wish)
            assert without_ids(choice["message"])["tool_calls"] == ([WEATHER, F] if wish == "required" else [F])
            assert choice["finish_reason"] == "tool_calls"
            grammar = server.requests()[-1].sampling.structured_outputs.grammar
            assert '\\"f\\"' in grammar or '"f"' in grammar
            assert ("weather" in grammar) == (wish == "required")

    run(main())


MISTAKES = {
    "unknown": ({"type": "function", "function": {"name": "g"}}, {}, "'g' is none of the tools"),
    "no function": ({"type": "allowed_tools"}, {}, "allowed_tools"),
    "a word": ("sometimes", {}, "sometimes"),
    "a form": ("required", {"response_format": {"type": "json_object"}}, "another form"),
    "a number": (3, {}, "tool_choice=3"),
}


@pytest.mark.parametrize("title", MISTAKES)
def test_mistakes_in_the_choice(run, served, title):
    choice, fields, words = MISTAKES[title]

    async def main():
        async with served() as server:
            set_up(server, CALLS)
            response = await server.chat(tools=TOOLS, tool_choice=choice, **fields)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tool_choice")
            assert words in error["message"]

    run(main())


@pytest.mark.parametrize("tool, words", [("none", "tool_call_parser"), ("mistral", "format mistral")])
def test_what_cannot_be_enforced(run, served, tool, words):
    async def main():
        async with served() as server:
            set_up(server, CALLS, tool=tool)
            error = (await server.chat(tools=TOOLS, tool_choice="required")).json()["error"]
            assert error["param"] == "tool_choice"
            assert words in error["message"]

    run(main())


def test_a_form_leaves_no_room_for_thoughts(run, served, events_of):
    async def main():
        async with served() as server:
            set_up(server, '{"a": "<think>"}', reasoning="deepseek_r1")
            choice, _ = await both(server, events_of, tools=TOOLS, response_format={"type": "json_object"})
            assert choice["message"] == {"role": "assistant", "content": '{"a": "<think>"}', "refusal": None}

    run(main())


def test_an_end_in_the_middle(run, served, events_of):
    async def main():
        async with served() as server:
            set_up(server, "<think>" + "long " * 50)
            choice, _ = await both(server, events_of, tools=TOOLS, max_tokens=16)
            assert choice["message"]["content"] is None
            assert choice["message"]["reasoning"] == "long long"
            assert choice["finish_reason"] == "length"
            set_up(server, CALLS)
            choice, _ = await both(server, events_of, tools=TOOLS, max_tokens=60)
            assert choice["finish_reason"] == "length"
            arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
            assert arguments
            assert ARGUMENTS.startswith(arguments)
            # stopped by a string: the call is not whole, so it is not waiting for a result
            choice, _ = await both(server, events_of, tools=TOOLS, stop="rich")
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "rich")

    run(main())


def test_several_answers(run, served, events_of):
    async def main():
        async with served() as server:
            set_up(server, "")
            server.fake.reply_to = lambda request, index: CALLS if index else "<think>a</think>b"
            first, second = (await server.chat(tools=TOOLS, n=2)).json()["choices"]
            assert (first["message"]["reasoning"], first["message"]["content"]) == ("a", "b")
            assert (first["finish_reason"], second["finish_reason"]) == ("stop", "tool_calls")
            events = events_of((await server.chat(tools=TOOLS, n=2, stream=True)).text)
            for choice in (first, second):
                mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
                assert joined([one["delta"] for one in mine]) == without_ids(choice["message"])
                assert mine[-1]["finish_reason"] == choice["finish_reason"]

    run(main())


def test_scores_of_all_tokens(run, served, events_of):
    async def main():
        async with served() as server:
            set_up(server, CALLS)
            fields = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1}
            whole = (await server.chat(**fields)).json()["choices"][0]["logprobs"]["content"]
            events = events_of((await server.chat(**fields, stream=True)).text)
            scores = [event["choices"][0]["logprobs"] for event in events]
            assert [entry for one in scores if one for entry in one["content"]] == whole

    run(main())


def test_marks_that_are_special_tokens_reach_the_parser(run, served, events_of):
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi <|user|>you"

    async def main():
        async with served() as server:
            # <|end|> is a special token of this tokenizer
            set_up(server, answer, tool="openai", reasoning="openai_gptoss")
            choice, _ = await both(server, events_of)
            assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "Hi you")
            assert [request.sampling.skip_special_tokens for request in server.requests()] == [False, False]
            choice, _ = await both(server, events_of, skip_special_tokens=False)
            assert choice["message"]["content"] == "Hi <|user|>you"
            # those of other formats are text, and nothing changes
            set_up(server, answer)
            await both(server, events_of, tools=TOOLS)
            assert server.requests()[-1].sampling.skip_special_tokens is True

    run(main())


def test_a_thought_that_is_continued(run, served):
    async def main():
        async with served() as server:
            set_up(server, "c</think>d")
            for begun, thought, text in (("<think>b", "c", "d"), ("<think>b</think>", None, "c</think>d")):
                messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": begun}]
                body = {"messages": messages, "continue_final_message": True}
                message = (await server.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
                assert (message.get("reasoning"), message["content"]) == (thought, text)

    run(main())


def test_mistral_wants_short_ids(run, served, events_of):
    async def main():
        async with served() as server:
            set_up(server, "[TOOL_CALLS]f[ARGS]{}", tool="mistral")
            choice, _ = await both(server, events_of, tools=TOOLS)
            assert re.fullmatch("[A-Za-z0-9]{9}", choice["message"]["tool_calls"][0]["id"])

    run(main())


def test_the_official_client(run, served, on_a_socket):
    async def main():
        async with served() as server, on_a_socket(server) as url:
            set_up(server, f"<think>Hm</think>{CALLS}")
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
                fields = {"model": "byte-model", "tools": TOOLS, "messages": [{"role": "user", "content": "Hi"}]}
                answer = await client.chat.completions.create(**fields)
                message = answer.choices[0].message
                assert [call.function.name for call in message.tool_calls] == ["weather", "f"]
                assert json.loads(message.tool_calls[0].function.arguments) == json.loads(ARGUMENTS)
                assert (message.content, message.reasoning_content) == (None, "Hm")
                async with client.chat.completions.stream(**fields) as stream:
                    final = (await stream.get_final_completion()).choices[0]
                assert final.finish_reason == "tool_calls"
                calls = [(call.function.name, call.function.arguments) for call in final.message.tool_calls]
                assert calls == [(call["name"], call["arguments"]) for call in (WEATHER, F)]
                # and back again: the template sees objects, the results follow
                results = [{"role": "tool", "tool_call_id": call.id, "content": "12 °C"} for call in message.tool_calls]
                fields["messages"] += [message, *results]
                await client.chat.completions.create(**fields)
                prompt = server.engine.renderer.decode(server.requests()[-1].prompt_token_ids, False)
                assert '"arguments": {"city": "Zürich' in prompt
                assert prompt.count("<|tool|>12 °C<|end|>") == 2

    run(main())
