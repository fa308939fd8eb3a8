"""Fields of vLLM's that say what an answer shows, and its further addresses."""

import json
from dataclasses import replace

import pytest

from quire.errors import RequestError
from quire.interfaces.requests import Limits, RequestMaker
from quire.interfaces.server.openai import rendering
from quire.interfaces.server.openai.requests import CompletionRequest
from quire.interfaces.server.openai.sampling import completion_params
from quire.renderer.fill_in_middle import MiddleMarks
from quire.sampling_params import SamplingParams

TEXT = "Answer 0 to"


def deltas(response):
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"n": 2}])
def test_tokens_as_numbers(run, served, endpoint, extra):
    async def main():
        async with served() as server:
            send = getattr(server, endpoint)
            whole = (await send(return_token_ids=True, **extra)).json()
            prompt = server.requests()[0].prompt_token_ids
            is_chat = endpoint == "chat"
            for choice in whole["choices"]:
                shown = whole if is_chat else choice
                assert shown["prompt_token_ids"] == prompt
                text = choice["message"]["content"] if is_chat else choice["text"]
                decoded = server.engine.renderer.decode(choice["token_ids"])
                assert text.endswith(decoded)
                assert decoded
            plain = (await send(**extra)).json()
            assert plain["choices"][0].get("token_ids") is None
            empty = (await send(return_token_ids=False, **extra)).json()
            assert empty["choices"][0]["token_ids"] is None

            events = deltas(await send(return_token_ids=True, stream=True, **extra))
            collected = {}
            for event in events:
                for choice in event["choices"]:
                    collected.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
            assert collected == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
            first = events[0] if is_chat else events[0]["choices"][0]
            assert first["prompt_token_ids"] == prompt

    run(main())


def test_tokens_have_numbers_as_names(run, served):
    async def main():
        async with served() as server:
            body = {"return_tokens_as_token_ids": True, "max_tokens": 4, "return_token_ids": True}
            (choice,) = (await server.complete(logprobs=1, **body)).json()["choices"]
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
            assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
            (choice,) = (await server.chat(logprobs=True, top_logprobs=1, **body)).json()["choices"]
            content = choice["logprobs"]["content"]
            assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]

    run(main())


def test_tokens_have_numbers_as_names_by_an_option(run, served):
    async def main():
        async with served(return_tokens_as_token_ids=True) as server:
            (choice,) = (await server.complete(logprobs=0)).json()["choices"]
            assert all(name.startswith("token_id:") for name in choice["logprobs"]["tokens"])
            (choice,) = (await server.complete(logprobs=0, return_tokens_as_token_ids=False)).json()["choices"]
            assert not any(name.startswith("token_id:") for name in choice["logprobs"]["tokens"])

    run(main())


def test_a_response_as_the_model_sees_it(run, served):
    async def main():
        async with served() as server:
            body = {"input": "Hi", "enable_response_messages": True, "store": False}
            response = (await server.post("/v1/responses", body)).json()
            (given,) = response["input_messages"]
            (written,) = response["output_messages"]
            (request,) = server.requests()
            assert given["tokens"] == request.prompt_token_ids
            assert given["message"] == server.engine.renderer.decode(request.prompt_token_ids, False)
            assert written["message"].startswith(TEXT)
            assert len(written["tokens"]) == response["usage"]["output_tokens"]

    run(main())


def test_how_many_requests_are_answered(run, served):
    async def main():
        async with served() as server:
            assert (await server.http.get("/load")).json() == {"server_load": 0}

    run(main())


def test_a_chat_repeats_its_last_message(run, served):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answ"}]

    async def main():
        async with served() as server:
            body = {"messages": messages, "continue_final_message": True, "echo": True}
            whole = (await server.post("/v1/chat/completions", body)).json()["choices"][0]["message"]["content"]
            assert whole.startswith("The answAnswer")
            events = deltas(await server.post("/v1/chat/completions", {**body, "stream": True}))
            assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole

    run(main())


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_every_event_counts_tokens(run, served, endpoint):
    async def main():
        async with served(force_include_usage=True) as server:
            events = deltas(await getattr(server, endpoint)(stream=True))
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            assert events[-1]["choices"] == []
            assert counts[-1] > 0
            whole = (await getattr(server, endpoint)()).json()["usage"]
            assert events[-1]["usage"]["total_tokens"] == whole["total_tokens"]

    run(main())


def test_counts_in_every_event_go_with_counts(run, served):
    async def main():
        async with served() as server:
            for options in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
                for endpoint in (server.chat, server.complete):
                    events = deltas(await endpoint(stream=True, stream_options=options))
                    assert {event.get("usage") for event in events} == {None}

    run(main())


def test_log_probabilities_of_named_tokens(run, served):
    async def main():
        async with served() as server:
            body = {"logprob_token_ids": [9, 200], "temperature": 0.0}
            assert (await server.chat(**body)).status_code == 400
            assert (await server.chat(**body, logprobs=True, top_logprobs=5)).status_code == 200
            assert (await server.complete(**body)).status_code == 200
            asked = [(one.sampling.logprobs, one.sampling.logprob_token_ids) for one in server.requests()]
            assert asked == [(0, [9, 200])] * 2
            for wrong in ([10**6], [-1], list(range(129))):
                error = (await server.complete(logprob_token_ids=wrong)).json()["error"]
                assert error["param"] == "logprob_token_ids"
            error = (await server.complete(**body, max_tokens=0, echo=True)).json()["error"]
            assert "generated" in error["message"]

    run(main())


def test_a_prompt_that_is_too_long_is_cut_where_that_is_asked_for(run, served):
    tokens = list(range(9, 109))

    async def main():
        async with served() as server:
            limit = server.engine.config.max_model_len
            for body, kept in (
                ({"truncate_prompt_tokens": 4}, tokens[-4:]),
                ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, tokens[:4]),
                ({"truncate_prompt_tokens": 100}, tokens),
                ({"truncate_prompt_tokens": -1, "max_tokens": limit - 10}, tokens[-10:]),
            ):
                body = {"prompt": tokens, "max_tokens": 2, "return_token_ids": True, "echo": True, **body}
                (choice,) = (await server.post("/v1/completions", body)).json()["choices"]
                assert choice["prompt_token_ids"] == kept
                assert choice["text"].startswith(server.engine.renderer.decode(kept))

            text = "ab" * limit
            assert (await server.post("/v1/completions", {"prompt": text})).status_code == 400
            answer = await server.post("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 8})
            assert answer.json()["usage"]["prompt_tokens"] == 8
            assert (await server.post("/v1/completions", {"prompt": text * 200, "truncate_prompt_tokens": 8})).is_error
            messages = [{"role": "user", "content": text}]
            answer = await server.post("/v1/chat/completions", {"messages": messages, "truncate_prompt_tokens": -1})
            assert answer.json()["usage"]["prompt_tokens"] == limit - 1

            for wrong in (
                {"truncate_prompt_tokens": limit + 1},
                {"truncate_prompt_tokens": 0},
                {"truncation_side": "x"},
            ):
                error = (await server.complete(**wrong)).json()["error"]
                assert error["param"] in wrong

    run(main())


def test_the_middle_of_a_text(run, served, monkeypatch):
    marks = MiddleMarks("<", "|", ">")

    async def main():
        async with served() as server:
            error = (await server.complete(suffix="b")).json()["error"]
            assert "fills in the middle" in error["message"]
            monkeypatch.setattr(rendering, "middle_marks", lambda renderer: marks)
            body = {"prompt": "a", "suffix": "b", "echo": True}
            (choice,) = (await server.post("/v1/completions", body)).json()["choices"]
            assert choice["text"].startswith("aAnswer")
            (request,) = server.requests()
            assert server.engine.renderer.decode(request.prompt_token_ids) == "<a|b>"
            error = (await server.post("/v1/completions", {"prompt": [9], "suffix": "b"})).json()["error"]
            assert error["param"] == "suffix"
            # a small body that would become 200 long prompts
            body = {"prompt": ["a"] * 200, "suffix": "b" * 50_000}
            error = (await server.post("/v1/completions", body)).json()["error"]
            assert (error["param"], "fewer prompts" in error["message"]) == ("suffix", True)

    run(main())


def test_all_log_probabilities(run, served):
    async def main():
        async with served() as server:
            assert (await server.chat(logprobs=True, top_logprobs=-1)).status_code == 400
            limits = server.engine._parts.maker.limits
            server.engine._parts.maker.limits = replace(limits, max_logprobs=-1)
            server.engine.config = replace(server.engine.config, max_logprobs=-1)
            assert (await server.chat(logprobs=True, top_logprobs=-1)).status_code == 200
            assert (await server.complete(prompt_logprobs=-1)).status_code == 200
            asked = [(one.sampling.logprobs, one.sampling.prompt_logprobs) for one in server.requests()]
            assert asked == [(limits.vocab_size, None), (None, limits.vocab_size)]

    run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/generate", {"model": "byte-model", "prompt": "Hi", "raw": True, "logprobs": True, "top_logprobs": -1,
                        "stream": False}),
     ("/completion", {"prompt": "Hi", "n_probs": -1}),
     ("/v1/responses", {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": -1})],
)  # fmt: skip
def test_all_log_probabilities_by_other_names(run, served, path, body):
    """They are shown, and not only computed."""

    async def main():
        async with served() as server:
            refused = await server.post(path, body)
            assert refused.status_code == 400
            limits = server.engine._parts.maker.limits
            server.engine._parts.maker.limits = replace(limits, max_logprobs=-1)
            server.engine.config = replace(server.engine.config, max_logprobs=-1)
            answer = await server.post(path, body)
            assert answer.status_code == 200, answer.text
            assert '"top_logprobs":[{' in answer.text

    run(main())


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_all_of_a_large_vocabulary_are_bounded(name):
    limits = Limits(vocab_size=2**17, max_model_len=2**16, max_logprobs=-1, max_num_seqs=8)
    maker = RequestMaker(limits, bad_words_token_ids=list)

    def sampling_and_length(num_positions, count=-1):
        is_prompt = name == "prompt_logprobs"
        params = SamplingParams(max_tokens=1 if is_prompt else num_positions, **{name: count})
        return [1] * (num_positions if is_prompt else 1), params

    assert getattr(maker.make(*sampling_and_length(128)).sampling, name) == 2**17
    maker.make(*sampling_and_length(20_000, 1_024))
    for count in (-1, 2**20):
        with pytest.raises(RequestError, match="at most 128 positions") as caught:
            maker.make(*sampling_and_length(129, count))
        assert caught.value.param == name


def test_a_prefix_of_a_proxy(run, served):
    async def main():
        async with served(root_path="/llm/") as server:
            for path in ("/llm/v1/models", "/v1/models"):
                assert (await server.http.get(path)).status_code == 200
            assert (await server.http.get("/llmv1/models")).status_code == 404

    run(main())


def test_what_a_container_answers(run, served):
    async def main():
        async with served() as server:
            assert (await server.http.get("/ping")).json() == {"status": "ready"}
            assert (await server.post("/ping", {})).status_code == 200
            messages = [{"role": "user", "content": "Hi"}]
            chat = (await server.post("/invocations", {"messages": messages})).json()
            assert chat["object"] == "chat.completion"
            assert (await server.post("/invocations", {"prompt": "Hi"})).json()["object"] == "text_completion"
            events = deltas(await server.post("/invocations", {"prompt": "Hi", "stream": True}))
            assert "".join(event["choices"][0]["text"] for event in events).startswith(TEXT)
            for body in ({"model": "x"}, [1]):
                assert (await server.post("/invocations", body)).status_code == 400

    run(main())


def test_settings_of_the_tokenizer(run, served):
    async def main():
        async with served() as server:
            assert (await server.http.get("/tokenizer_info")).status_code == 404
        async with served(tokenizer_info=True) as server:
            info = (await server.http.get("/tokenizer_info")).json()
            assert info["chat_template"] == server.engine.renderer.chat_templates["default"]
            assert info["model_max_length"] >= 512

    run(main())


def test_roles_that_the_template_writes_down(run, served):
    async def main():
        async with served() as server:
            for role, status in (("narrator", 200), ("<|im_start|>", 400), ("", 400)):
                body = {"messages": [{"role": role, "content": "x"}]}
                assert (await server.post("/v1/chat/completions", body)).status_code == status, role
            (request,) = server.requests()
            assert "narrator" in server.engine.renderer.decode(request.prompt_token_ids, False)

    run(main())


@pytest.mark.parametrize(("asked", "least"), [({}, 5), ({"max_tokens": 1}, 1), ({"max_tokens": 9, "min_tokens": 2}, 2)])
def test_a_models_least_number_of_tokens_refuses_nobody(asked, least):
    """As its recommendation; what a request says itself has to fit."""
    body = CompletionRequest(prompt="a", **asked)
    assert completion_params(body, {"min_tokens": 5}).min_tokens == least
    with pytest.raises(RequestError, match="min_tokens=5: must not exceed"):
        completion_params(CompletionRequest(prompt="a", max_tokens=1, min_tokens=5), {})


PARTS = {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"}


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_times_of_a_request(run, served, endpoint):
    async def main():
        async with served(enable_per_request_metrics=True) as server:
            send = getattr(server, endpoint)
            whole = (await send()).json()
            assert whole["metrics"].keys() == PARTS
            assert min(whole["metrics"].values()) >= 0
            events = deltas(await send(stream=True, stream_options={"include_usage": True}))
            assert events[-1]["metrics"].keys() == PARTS
            assert [event for event in events[:-1] if "metrics" in event] == []
            short = (await send(max_tokens=1)).json()
            assert short["metrics"].keys() == PARTS - {"mean_itl_ms"}
            if endpoint == "complete":
                assert "metrics" not in (await send(prompt=["a", "b"])).json()
        async with served() as server:
            assert "metrics" not in (await getattr(server, endpoint)()).json()

    run(main())


def test_tokens_that_another_server_has_made_of_a_chat(run, served):
    async def main():
        async with served() as server:
            body = {"messages": [{"role": "user", "content": "something else"}]}
            params = {"prompt_token_ids": [72, 105]}
            answer = await server.post("/v1/chat/completions", {**body, "kv_transfer_params": params})
            assert answer.json()["usage"]["prompt_tokens"] == 2
            assert server.requests()[-1].prompt_token_ids == [72, 105]
            for wrong in ([10**6], [-1], [True], "ab", [[1]]):
                refused = {**body, "kv_transfer_params": {"prompt_token_ids": wrong}}
                answer = await server.post("/v1/chat/completions", refused)
                assert (answer.status_code, "kv_transfer_params" in answer.text) == (400, True), wrong
            answer = await server.complete(kv_transfer_params=params)
            assert (answer.status_code, "Give them as prompt" in answer.text) == (400, True)

    run(main())


def test_values_for_the_template_that_the_server_knows(run, served):
    messages = [{"role": "user", "content": "Hi"}]

    async def main():
        async with served(default_chat_template_kwargs={"mood": "calm", "pace": "slow"}) as server:
            seen = []
            render = server.engine.renderer.render_prompt
            server.engine.renderer.render_prompt = lambda chat, **options: (
                seen.append(options.get("template_kwargs")) or render(chat, **options)
            )
            await server.chat()
            await server.post("/tokenize", {"messages": messages, "chat_template_kwargs": {"pace": "fast"}})
            await server.complete()
            assert seen == [{"mood": "calm", "pace": "slow"}, {"mood": "calm", "pace": "fast"}, None]

    run(main())


def test_seeds_are_openais(run, served):
    async def main():
        async with served() as server:
            for seed, code in ((2**63, "less_than_equal"), (-(2**63) - 1, "greater_than_equal")):
                error = (await server.chat(seed=seed)).json()["error"]
                assert (error["param"], error["code"]) == ("seed", code)
            for seed in (2**63 - 1, -(2**63)):
                assert (await server.chat(seed=seed)).status_code == 200

    run(main())
