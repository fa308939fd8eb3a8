"""llama.cpp's own endpoints on a fake engine: completions whole and streamed, their fields, holes, slots."""

import json

import pytest

from quire.interfaces.server.llama_cpp import endpoints
from quire.renderer.fill_in_middle import MiddleMarks


@pytest.fixture
def asked(run, served):
    """Runs a test with a server."""

    def start(test):
        async def main():
            async with served(max_model_len=2048) as server:
                return await test(server)

        return run(main())

    return start


def events_of(response):
    assert response.status_code == 200, response.text
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def prompt_of(server) -> str:
    return server.engine.renderer.decode(server.requests()[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_completion_whole_and_streamed(asked):
    async def test(server):
        whole = (await server.post("/completion", {"prompt": "Hi", "return_tokens": True})).json()
        events = events_of(await server.post("/completion", {"prompt": [72, 105], "stream": True}))
        (text,) = server.texts(1, 2)
        assert whole["content"] == "".join(event["content"] for event in events) == text
        assert server.engine.renderer.decode(whole["tokens"]) == text
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        for end in (whole, events[-1]):
            assert (end["stop_type"], end["stopping_word"], end["truncated"]) == ("eos", "", False)
            assert end["tokens_evaluated"] == 2
            assert end["tokens_predicted"] == end["timings"]["predicted_n"] == len(text.encode()) + 1
        assert (whole["prompt"], events[-1]["prompt"]) == ("Hi", [72, 105])

    asked(test)


def test_fields_reach_the_engine(asked):
    fields = {
        "n_predict": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": -1, "stop": ["x"],
        "repeat_penalty": 1.2, "ignore_eos": True, "logit_bias": [[65, 2], [66, False]], "n_probs": 2,
        # what asks for nothing here
        "cache_prompt": True, "id_slot": -1, "n_keep": 3, "mirostat": 0, "samplers": [],
    }  # fmt: skip

    async def test(server):
        body = (await server.post("/completion", {"prompt": "Hi", **fields})).json()
        sampling = server.requests()[-1].sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (5, 0.5, 3, 0.9)
        assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, None, 1.2)
        assert (sampling.ignore_eos, sampling.logit_bias) == (True, {65: 2, 66: -100})
        assert body["stop_type"] == "limit"
        assert len(body["completion_probabilities"]) == 5
        assert body["generation_settings"]["top_k"] == 3
        for form in ({"grammar": 'root ::= "a"'}, {"json_schema": {"type": "object"}}):
            await server.post("/completion", {"prompt": "Hi", **form})
            assert server.requests()[-1].sampling.structured_outputs is not None
        assert events_of(await server.post("/completion", {"prompt": "Hi", "stream": True, "timings_per_token": True}))[
            0
        ]["timings"]

    asked(test)


def test_no_more_is_written_than_there_is_room(asked):
    async def test(server):
        await server.post("/completion", {"prompt": "Hi", "n_predict": 10**6})
        assert server.requests()[-1].sampling.max_tokens == 2046
        await server.post(
            "/api/chat",
            {"model": "byte-model", "messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 10**6}},
        )
        assert len(server.requests()) == 2

    asked(test)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "Hi", "n_predict": 2**40}, "n_predict"),
        ({"prompt": "Hi", "repeat_penalty": -1}, "repeat_penalty"),
        ({"prompt": "Hi", "mirostat": 1}, "mirostat: not supported"),
        ({"prompt": "Hi", "logit_bias": [[1]]}, "logit_bias[0]"),
        ({"prompt": "Hi", "grammar": "a", "json_schema": {}}, "json_schema"),
        ({"prompt": [1, 10**9]}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_mistakes_are_named(asked, fields, words):
    async def test(server):
        response = await server.post("/completion", fields)
        assert response.status_code == 400, response.text
        assert words in response.json()["error"]["message"]

    asked(test)


def test_a_hole_is_filled_by_a_model_that_can(asked, monkeypatch):
    body = {"input_prefix": "a", "input_suffix": "c", "prompt": "b", "input_extra": [{"text": "x", "filename": "f"}]}

    async def test(server):
        refused = await server.post("/infill", body)
        assert refused.status_code == 400
        assert "hole" in refused.json()["error"]["message"]
        monkeypatch.setattr(endpoints, "middle_marks", lambda renderer: MiddleMarks("<P>", "<S>", "<M>"))
        assert (await server.post("/infill", body)).status_code == 200
        assert prompt_of(server) == "<P>f\nx\na<S>c<M>b"

    asked(test)


def test_the_server_describes_itself(asked):
    async def test(server):
        props = (await server.http.get("/props")).json()
        assert props["model_alias"] == "byte-model"
        assert props["default_generation_settings"]["n_ctx"] == 2048
        assert "<|{{ message.role }}|>" in props["chat_template"]
        slots = (await server.http.get("/slots")).json()
        assert len(slots) == props["total_slots"]
        # two requests run in the fake
        assert [slot["is_processing"] for slot in slots].count(True) == 2
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        assert (await server.post("/apply-template", body)).json() == {"prompt": "<|user|>Hi<|end|><|assistant|>"}

    asked(test)
