"""use_beam_search in both endpoints, on a fake engine."""

import pytest

from quire.interfaces.server.openai.requests import GenerationFields
from quire.interfaces.server.openai.sampling import _FOR_BEAMS, FORMS, NOT_WITH_BEAMS, ONLY_WITH_BEAMS
from quire.messages import DecodingSpec
from quire.testing.fake_beams import logprob_of_tail

PROMPT = "abcdefg"
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 8}
# eight tokens of the fake: four are settled, then each output goes on a letter further; the best one ends by itself
TEXTS = ["abcdefg", "abcdfgab", "abcdgabc"]
SUMS = [4 * -0.5 + 4 * logprob_of_tail(index) for index in range(3)]
ENDS = ["stop", "length", "length"]


def test_the_choices_are_the_beams_best_first(run, served):
    async def main():
        async with served() as server:
            body = (await server.complete(PROMPT, **BEAMS)).json()
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
            assert [choice["text"] for choice in body["choices"]] == TEXTS
            assert [choice["finish_reason"] for choice in body["choices"]] == ENDS
            assert all(choice["logprobs"] is None for choice in body["choices"])
            assert body["usage"]["prompt_tokens"] == 7
            assert body["usage"]["completion_tokens"] == 24, "the tokens of all choices"

    run(main())


def test_a_chat_has_beams_too(run, served):
    async def main():
        async with served() as server:
            # the prompt that is repeated begins with a special token, which has no text
            body = (await server.chat(PROMPT, **BEAMS)).json()
            assert [choice["message"]["content"] for choice in body["choices"]] == ["abcdef", "abcefg", "abcfg"]
            assert [choice["finish_reason"] for choice in body["choices"]] == ENDS
            assert body["usage"]["completion_tokens"] == 24

    run(main())


def test_what_reaches_the_engine(run, served):
    fields = {
        **BEAMS,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "temperature": 0.7,
        "ignore_eos": True,
        "stop_token_ids": [33],
        "skip_special_tokens": False,
        "repetition_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "top_p": 0.75,
        "top_k": 9,
        "do_sample": True,
        "seed": 12,
    }
    generation_config = {"temperature": 0.25, "top_k": 5, "repetition_penalty": 1.2, "max_new_tokens": 7}

    async def main():
        async with served(generation_config=generation_config) as server:
            await server.complete(PROMPT, **fields)
            await server.chat(use_beam_search=True)
            asked, least = server.requests()
            args = {"width": 3, "length_penalty": 0.5, "early_stopping": "never", "do_sample": True}
            assert asked.decoding == DecodingSpec(method="beam_search", args=args)
            assert (asked.sampling.n, asked.sampling.max_tokens, asked.sampling.temperature) == (3, 8, 0.7)
            assert (asked.sampling.ignore_eos, asked.sampling.stop_token_ids) == (True, [33])
            assert asked.sampling.skip_special_tokens is False
            penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty", "top_p", "top_k")
            assert [getattr(asked.sampling, name) for name in penalties] == [1.25, 0.5, -0.5, 0.75, 9]
            assert asked.seed == 12
            # one beam; of what the model's authors recommend for drawing, nothing but the length is for beams
            args = {"width": 1, "length_penalty": 1.0, "early_stopping": False}
            assert least.decoding == DecodingSpec(method="beam_search", args=args)
            assert (least.sampling.n, least.sampling.max_tokens, least.sampling.temperature) == (1, 7, 0.0)
            assert (least.sampling.top_k, least.sampling.repetition_penalty) == (0, 1.0)

    run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_adds_up_to_the_whole(run, served, events_of, path):
    fields = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    options = {"stream": True, "stream_options": {"include_usage": True}}

    async def main():
        async with served() as server:
            whole = (await server.post(path, {**fields, **BEAMS})).json()
            *events, last = events_of((await server.post(path, {**fields, **BEAMS, **options})).text)
            texts, ends, settled = ["", "", ""], {}, ""
            for event in events:
                (choice,) = event["choices"]
                texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if choice["finish_reason"]:
                    settled = settled or texts[2]
                    ends[choice["index"]] = choice["finish_reason"]
            shown = [choice.get("text") or choice["message"]["content"] for choice in whole["choices"]]
            assert texts == shown
            assert [ends[index] for index in range(3)] == ENDS
            assert last["usage"] == whole["usage"]
            # what all beams share was there before the search ended
            assert settled == ("abc" if "chat" in path else "abcd")

    run(main())


def test_log_probabilities_are_there_if_they_were_asked_for(run, served):
    async def main():
        async with served() as server:
            body = (await server.complete(PROMPT, **BEAMS, logprobs=2)).json()
            for choice, expected in zip(body["choices"], SUMS, strict=True):
                assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(expected)
                assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 8
            body = (await server.chat("x", **BEAMS, logprobs=True, top_logprobs=1)).json()
            for choice, expected in zip(body["choices"], SUMS, strict=True):
                content = choice["logprobs"]["content"]
                assert sum(entry["logprob"] for entry in content) == pytest.approx(expected)
                assert [len(entry["top_logprobs"]) for entry in content] == [1] * 8

    run(main())


def test_several_prompts_and_their_text(run, served):
    async def main():
        async with served() as server:
            body = (await server.complete(["ab", "c"], **BEAMS, echo=True)).json()
            assert len(body["choices"]) == 6
            assert [choice["text"][:4] for choice in body["choices"]] == ["abab"] * 3 + ["cccc"] * 3

    run(main())


# field -> a value that would change the answer, were it not for the beams
WRONG = {
    "min_p": 0.1, "stop": "x", "logit_bias": {"5": 1}, "bad_words": ["x"], "allowed_token_ids": [1], "min_tokens": 1,
    "thinking_token_budget": 5, "logits_processors": ["x"],
    "watermarking": True, "include_stop_str_in_output": True, "prompt_logprobs": 0, "logprob_token_ids": [1],
}  # fmt: skip


def test_every_field_is_for_beams_or_refused_with_them():
    assert set(WRONG) == set(NOT_WITH_BEAMS)
    whatever = {"model", "stream", "stream_options", "add_special_tokens", "priority", "cache_salt"}
    # the prompt of beams is computed elsewhere as any other: tests/interfaces/deploy/test_disaggregation.py
    whatever.add("kv_transfer_params")
    whatever |= {"return_token_ids", "return_tokens_as_token_ids", "truncate_prompt_tokens", "truncation_side"}
    known = {*NOT_WITH_BEAMS, *_FOR_BEAMS, *FORMS, *whatever, "n", "use_beam_search"}
    assert set(GenerationFields.__struct_fields__) == known


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_field_that_beams_do_not_know_is_refused_by_name(run, served, path, name):
    fields = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": PROMPT}

    async def main():
        async with served() as server:
            response = await server.post(path, {**fields, **BEAMS, name: WRONG[name]})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            assert "use_beam_search" in error["message"]
            for neutral in (*NOT_WITH_BEAMS[name], None):
                response = await server.post(path, {**fields, **BEAMS, name: neutral})
                assert response.status_code == 200, response.text

    run(main())


ELSEWHERE = {"beam_width": 4, "num_beams": 4, "num_return_sequences": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_that_others_use_is_refused_with_what_to_use(run, served, name):
    async def main():
        async with served() as server:
            for send in (server.complete, server.chat):
                response = await send(PROMPT, **BEAMS, **{name: ELSEWHERE[name]})
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, name)
                assert ("Python" if "group" in name or "diversity" in name else "use n") in error["message"]
            assert (await server.complete(PROMPT, **BEAMS, num_beam_groups=1, diversity_penalty=0)).status_code == 200

    run(main())


OTHERS = {
    "penalty alone": ({"length_penalty": 2.0}, "length_penalty"),
    "stopping alone": ({"early_stopping": True}, "early_stopping"),
    "stopping alone, a word": ({"use_beam_search": False, "early_stopping": "never"}, "early_stopping"),
    "draws alone": ({"do_sample": True}, "do_sample"),
    "nucleus wrong": ({**BEAMS, "top_p": 1.5}, "top_p"),
    "stopping wrong": ({**BEAMS, "early_stopping": "always"}, "early_stopping"),
    "stopping a number": ({**BEAMS, "early_stopping": 1}, "early_stopping"),
    "penalty huge": ({**BEAMS, "length_penalty": 1000}, "length_penalty"),
    "penalty a text": ({**BEAMS, "length_penalty": "1"}, "length_penalty"),
    "no beam": ({**BEAMS, "n": 0}, "n"),
    "more than run at once": ({**BEAMS, "n": 9}, "n"),
    "more than anybody takes": ({**BEAMS, "n": 129}, "n"),
    "no switch": ({"use_beam_search": "yes"}, "use_beam_search"),
    "scores of an echo": ({**BEAMS, "echo": True, "logprobs": 1}, "logprobs"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_mistake_names_its_field(run, served, case):
    fields, param = OTHERS[case]

    async def main():
        async with served() as server:
            response = await server.complete(PROMPT, **fields)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert error["message"].startswith(param)
            assert "beam_width" not in error["message"], "the request has no such field"
            assert server.requests() == []

    run(main())


def test_neutral_values_pass_without_beams(run, served):
    async def main():
        async with served() as server:
            for neutral in ({"length_penalty": 1}, {"early_stopping": False}, {"use_beam_search": False}):
                assert (await server.complete(PROMPT, **neutral)).status_code == 200
            assert (await server.complete(PROMPT, **dict.fromkeys(ONLY_WITH_BEAMS))).status_code == 200
            assert all(request.decoding is None for request in server.requests())

    run(main())


def test_a_refusal_of_the_engine(run, served):
    async def main():
        async with served() as server:
            server.fake.core.refusal = "KV cache: 9 blocks are needed, the engine has 4. Lower max_tokens."
            response = await server.complete(PROMPT, **BEAMS)
            assert (response.status_code, response.json()["error"]["message"]) == (400, server.fake.core.refusal)

    run(main())
