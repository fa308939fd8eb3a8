"""POST /v1/completions on a fake engine."""

import pytest

PROMPT = "Grü\u00dfe"
TOKENS = list(PROMPT.encode())


def test_an_answer(run, served):
    async def main():
        async with served() as server:
            body = (await server.complete("Hello")).json()
            assert body["id"].startswith("cmpl-")
            assert body["object"] == "text_completion"
            # 16 tokens, unless the request says otherwise
            assert body["choices"] == [
                {
                    "index": 0,
                    "text": "Answer 0 to 5 to",
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                    "prompt_logprobs": None,
                    "token_ids": None,
                    "prompt_token_ids": None,
                }
            ]
            assert body["usage"]["completion_tokens"] == 16

    run(main())


@pytest.mark.parametrize("prompt", [PROMPT, TOKENS, [PROMPT], [TOKENS]])
def test_the_four_forms_of_a_prompt(run, served, prompt):
    async def main():
        async with served() as server:
            body = (await server.complete(prompt, echo=True, max_tokens=3)).json()
            assert [choice["text"] for choice in body["choices"]] == [PROMPT + "Ans"]
            assert [request.prompt_token_ids for request in server.requests()] == [TOKENS]

    run(main())


def test_several_prompts_and_answers(run, served):
    async def main():
        async with served() as server:
            body = (await server.complete(["a", "bcd"], n=2, max_tokens=100)).json()
            texts = [choice["text"] for choice in body["choices"]]
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
            assert texts == server.texts(2, 1) + server.texts(2, 3)
            assert body["usage"]["prompt_tokens"] == 4

    run(main())


def test_the_prompt_alone(run, served):
    async def main():
        async with served() as server:
            body = (await server.complete("ab", echo=True, max_tokens=0, logprobs=1)).json()
            (choice,) = body["choices"]
            assert choice["text"] == "ab"
            assert choice["logprobs"] == {
                "tokens": ["a", "b"],
                "token_logprobs": [None, -0.5],
                "top_logprobs": [None, {"b": -0.5}],
                "text_offset": [0, 1],
            }
            assert body["usage"]["completion_tokens"] == 0

    run(main())


def test_offsets_are_in_characters(run, served):
    async def main():
        async with served() as server:
            server.fake.reply_to = lambda request, index: "é\U0001f600x"
            (choice,) = (await server.complete("aü", echo=True, logprobs=0, max_tokens=50)).json()["choices"]
            # a | ü ü | é é | four bytes of one character | x | the end, which has no text
            assert choice["text"] == "aüé\U0001f600x"
            assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 5]
            # the chosen token is always among the best
            assert choice["logprobs"]["top_logprobs"][1:2] == [{"\ufffd": -0.5}]

    run(main())


def test_prompt_logprobs_are_vllms(run, served):
    async def main():
        async with served() as server:
            (choice,) = (await server.complete("ab", prompt_logprobs=2)).json()["choices"]
            assert choice["prompt_logprobs"] == [
                None,
                {
                    "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
                    "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
                },
            ]
            for said, meant in ((True, 1), (False, None)):
                answers = [(await server.complete("ab", prompt_logprobs=one)).json() for one in (said, meant)]
                assert answers[0]["choices"] == answers[1]["choices"]

    run(main())


def test_one_failure_ends_the_whole_request(run, served):
    async def main():
        async with served() as server:
            server.fake.failures[2] = "broken"
            assert (await server.complete(["a", "b"])).status_code == 500
            assert not server.fake.running
            assert len(server.state.in_flight) == 0

    run(main())
