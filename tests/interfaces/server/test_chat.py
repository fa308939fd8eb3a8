"""POST /v1/chat/completions on a fake engine: answers, streams, counts, fields that must reach the engine."""

import threading
from importlib.metadata import EntryPoint

import pytest

from quire.interfaces.server.openai.requests import GenerationFields
from quire.interfaces.server.openai.sampling import FORMS as STRUCTURED_FIELDS
from quire.interfaces.server.openai.sampling import ONLY_WITH_BEAMS
from quire.logits_processors import GROUP, installed
from quire.renderer import template_budget, template_sandbox


def test_an_answer(run, served):
    async def main():
        async with served() as server:
            body = (await server.chat("Hello")).json()
            (text,) = server.texts(1, 8)
            assert body["id"].startswith("chatcmpl-")
            assert (body["object"], body["model"]) == ("chat.completion", "byte-model")
            assert body["choices"] == [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ]
            generated = len(text.encode()) + 1
            assert body["usage"] == {
                "prompt_tokens": 8,
                "completion_tokens": generated,
                "total_tokens": 8 + generated,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {
                    "reasoning_tokens": 0,
                    "accepted_prediction_tokens": 0,
                    "rejected_prediction_tokens": 0,
                },
            }

    run(main())


def test_messages_as_the_template_sees_them(run, served):
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    async def main():
        async with served() as server:

            async def prompt_of(**fields):
                response = await server.post("/tokenize", {"messages": messages, **fields})
                tokens = response.json()["tokens"]
                return (await server.post("/detokenize", {"tokens": tokens})).json()["prompt"]

            calls = '[{"function": {"name": "f", "arguments": {"x": 1}}}]'
            common = f"<|system|>Be kind.<|end|><|user|>a\nb<|end|><|assistant|>{calls}<|end|><|tool|>2<|end|>"
            assert await prompt_of() == common + "<|assistant|>"
            assert await prompt_of(add_generation_prompt=False) == common
            assert await prompt_of(tools=tools) == common + "[1 tools]<|assistant|>"
            assert await prompt_of(chat_template_kwargs={"mood": "calm"}) == common + "[calm]<|assistant|>"

            fields = {"messages": messages, "tools": tools, "max_tokens": 1}
            await server.post("/v1/chat/completions", {**fields, "tool_choice": "auto"})
            await server.post("/v1/chat/completions", {**fields, "tool_choice": "none"})
            with_tools, without = (server.engine.renderer.decode(r.prompt_token_ids, False) for r in server.requests())
            assert "[1 tools]" in with_tools
            assert "tools]" not in without

    run(main())


def test_a_final_message_is_continued(run, served):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answ"}]

    async def main():
        async with served() as server:
            body = {"messages": messages, "continue_final_message": True}
            assert (await server.post("/v1/chat/completions", body)).status_code == 200
            (request,) = server.requests()
            assert server.engine.renderer.decode(request.prompt_token_ids, False).endswith("<|assistant|>The answ")

    run(main())


SAMPLING = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.3,
    "repetition_penalty": 1.1,
    "seed": 17,
    "stop": ["zzz"],
    "stop_token_ids": [3],
    "bad_words": ["no"],
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "logit_bias": {5: 1.5},
    "allowed_token_ids": [5, 6, 65],
    "prompt_logprobs": 2,
}


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_every_sampling_field_reaches_the_engine(run, served, endpoint):
    async def main():
        async with served() as server:
            fields = {**SAMPLING, "logit_bias": {"5": 1.5}}
            response = await getattr(server, endpoint)(**fields, max_tokens=9, priority=-3, cache_salt="mine")
            assert response.status_code == 200, response.text
            (request,) = server.requests()
            assert {name: getattr(request.sampling, name) for name in SAMPLING} == SAMPLING
            assert request.sampling.max_tokens == 9
            assert (request.priority, request.cache_salt) == (-3, "mine")

    run(main())


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_who_reads_an_answer_whole_may_get_it_in_bursts(run, served, endpoint):
    async def main():
        async with served() as server:
            for options in ({}, {"stream": True}, {"stream": False}):
                assert (await getattr(server, endpoint)(max_tokens=2, **options)).status_code == 200
            assert [request.in_bursts for request in server.requests()] == [True, False, True]

    run(main())


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_named_processors_reach_the_engine(run, served, endpoint, monkeypatch):
    monkeypatch.setitem(installed(), "only", EntryPoint("only", "nowhere:only", GROUP))
    asked = ["only", {"name": "only", "args": {"token": 9}}]

    async def main():
        async with served() as server:
            response = await getattr(server, endpoint)(logits_processors=asked, max_tokens=2)
            assert response.status_code == 200, response.text
            (request,) = server.requests()
            assert request.sampling.logits_processors == asked

            response = await getattr(server, endpoint)(logits_processors=["onyl"])
            assert response.status_code == 400
            assert 'Did you mean "only"?' in response.json()["error"]["message"]

    run(main())


def test_no_generation_field_is_forgotten_here():
    elsewhere = {"model", "stream", "stream_options", "add_special_tokens", "priority", "cache_salt"}
    # this model writes no thoughts: test_anthropic_messages.py
    elsewhere |= {"thinking_token_budget"}
    # names of what is installed: the test above
    elsewhere |= {"logits_processors"}
    # needs a store: tests/interfaces/deploy/test_disaggregation.py
    elsewhere |= {"kv_transfer_params"}
    # tests/interfaces/server/test_vllm_fields.py
    elsewhere |= {"return_token_ids", "return_tokens_as_token_ids", "logprob_token_ids"}
    elsewhere |= {"truncate_prompt_tokens", "truncation_side"}
    # tests/interfaces/server/test_watermark.py
    elsewhere |= {"watermarking"}
    elsewhere |= {"use_beam_search", *ONLY_WITH_BEAMS, *STRUCTURED_FIELDS}
    assert set(GenerationFields.__struct_fields__) - elsewhere == set(SAMPLING)


def test_defaults_of_the_model(run, served):
    generation_config = {"temperature": 0.25, "top_k": 5, "repetition_penalty": 1.2, "max_new_tokens": 7}

    async def main():
        async with served(generation_config=generation_config) as server:
            await server.chat()
            await server.chat(temperature=1.5, max_tokens=3)
            recommended, asked = (request.sampling for request in server.requests())
            assert (recommended.temperature, recommended.top_k, recommended.max_tokens) == (0.25, 5, 7)
            assert (asked.temperature, asked.top_k, asked.max_tokens) == (1.5, 5, 3)
            assert asked.repetition_penalty == 1.2

    run(main())


def test_length_without_a_limit_is_what_is_left(run, served):
    async def main():
        async with served(max_model_len=40) as server:
            body = (await server.chat(ignore_eos=True)).json()
            assert body["usage"]["total_tokens"] == 40
            assert body["choices"][0]["finish_reason"] == "length"

    run(main())


def test_stop_strings(run, served):
    async def main():
        async with served() as server:
            body = (await server.chat(n=2, stop=["tokens", "never"])).json()
            for index, choice in enumerate(body["choices"]):
                assert choice["message"]["content"] == f"Answer {index} to 5 "
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "tokens")
            # the core was told, because it cannot know
            assert server.fake.dropped == [(0, 0), (0, 1)]
            kept = (await server.chat(stop="tokens", include_stop_str_in_output=True)).json()
            assert kept["choices"][0]["message"]["content"] == "Answer 0 to 5 tokens"

    run(main())


def test_logprobs(run, served):
    async def main():
        async with served() as server:
            server.fake.reply_to = lambda request, index: "aü"
            body = (await server.chat(logprobs=True, top_logprobs=2)).json()
            choice = body["choices"][0]
            assert choice["logprobs"]["refusal"] is None
            content = choice["logprobs"]["content"]
            # three bytes and the end
            assert [entry["bytes"] for entry in content[:3]] == [[97], [195], [188]]
            assert bytes(byte for entry in content[:3] for byte in entry["bytes"]).decode() == "aü"
            assert content[0] == {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "b", "logprob": -1.5, "bytes": [98]},
                ],
            }
            plain = (await server.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
            assert [entry["top_logprobs"] for entry in plain] == [[]] * 4
            assert [entry["logprob"] for entry in plain] == [entry["logprob"] for entry in content]

    run(main())


def test_prompt_logprobs(run, served):
    async def main():
        async with served() as server:
            body = (await server.chat(prompt_logprobs=1)).json()
            scores = body["prompt_logprobs"]
            assert len(scores) == body["usage"]["prompt_tokens"]
            assert scores[0] is None
            assert scores[1][str(ord("H"))] == {"logprob": -0.5, "rank": 1, "decoded_token": "H"}

    run(main())


def test_the_model_may_be_left_out_or_named(run, served):
    async def main():
        async with served() as server:
            assert (await server.chat()).json()["model"] == "byte-model"
            assert (await server.chat(model="byte-model")).json()["model"] == "byte-model"

    run(main())


def test_a_template_that_takes_long_does_not_hold_the_event_loop(run, served, monkeypatch):
    """Also with a short chat: what is too much for the loop is done in a thread, with the whole budget."""
    threads = []

    def noting(template, values, allowance=template_budget.WHOLE):
        threads.append((allowance is template_budget.WHOLE, threading.current_thread() is threading.main_thread()))
        return rendered(template, values, allowance)

    rendered = template_sandbox.render
    monkeypatch.setattr(template_sandbox, "render", noting)
    loops = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
    template = "{% if messages|length > 1 %}" + loops + "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"

    async def main():
        async with served() as server:
            server.state.serving.engine.renderer._templates.texts["default"] = template
            messages = [{"role": "user", "content": "hi"}]
            for chat in (messages, messages, messages * 3):
                answer = await server.chat(messages=chat)
            assert answer.status_code == 400
            assert "more than 4,000,000 steps" in answer.json()["error"]["message"]

    run(main())
    # the first compiles the template, as it is not the one that the model came with
    assert threads == [(True, False), (False, True), (False, True), (True, False)]
