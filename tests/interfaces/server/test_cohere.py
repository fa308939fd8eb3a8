"""/v2/embed on a fake engine: vectors in Cohere's words."""

import asyncio
import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest

from quire.interfaces.server.cohere import CohereWork
from quire.interfaces.server.openai.pooling_work import PoolingUsage


def test_an_answer(run, served):
    async def main():
        async with served() as server:
            expected = (await server.post("/v1/embeddings", {"input": ["ab", "c"], "dimensions": 2})).json()["data"]
            fields = {"output_dimension": 2, "embedding_types": ["float", "base64", "float"]}
            answer = (await server.post("/v2/embed", {"texts": ["ab", "c"], **fields})).json()
            assert answer["embeddings"]["float"] == [one["embedding"] for one in expected]
            texts = answer["embeddings"]["base64"]
            assert [np.frombuffer(base64.b64decode(text), np.float32).tolist() for text in texts] == [
                pytest.approx(one["embedding"]) for one in expected
            ]
            assert answer["texts"] == ["ab", "c"]
            assert answer["meta"] == {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": 3, "image_tokens": 0},
            }
            assert answer["response_type"] == "embeddings_by_type"
            parts = [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
            answer = (await server.post("/v2/embed", {"inputs": parts, "priority": 3})).json()
            assert server.requests()[-1].priority == 3
            assert answer["texts"] == ["a\nb"]
            assert list(answer["embeddings"]) == ["float"]

    run(main())


def test_bits():
    vector = np.array([0.5, -0.5, 0, -1, 1, 1, 1, 1] + [-1.0] * 8, np.float32)

    async def outputs():
        return [SimpleNamespace(outputs=SimpleNamespace(vector=vector))]

    work = SimpleNamespace(outputs=outputs, usage=PoolingUsage(1, 1))
    vectors = asyncio.run(CohereWork(work, ["a"], ["binary", "ubinary"]).whole()).embeddings
    assert list(vectors.ubinary) == [[0b10101111, 0]]
    assert list(vectors.binary) == [[0b10101111 - 128, -128]]


def test_what_stands_before_a_text(run, served, tmp_path):
    async def main():
        async with served() as server:

            async def prompt(input_type):
                answer = await server.post("/v2/embed", {"texts": ["x"], "input_type": input_type})
                if answer.status_code != 200:
                    return answer.json()["error"]["message"]
                assert answer.json()["texts"] == ["x"]
                return bytes(server.requests()[-1].prompt_token_ids)

            assert await prompt("search_query") == b"x"
            assert "Unsupported input_type 'q'. This model knows search_query, search_doc" in await prompt("q")
            prompts = {"query": "q: ", "passage": "p: ", "other": "o: "}
            (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
            assert await prompt("search_query") == b"q: x"
            assert await prompt("search_document") == b"p: x"
            assert await prompt("other") == b"o: x"
            assert await prompt(None) == b"x"
            assert "This model knows other, passage, query" in await prompt("clustering")
            (tmp_path / "model" / "config_sentence_transformers.json").write_text("{")
            assert "Send texts without a type" in await prompt("clustering")

    run(main())


def test_long_texts_are_cut(run, served):
    async def main():
        async with served(max_model_len=8) as server:
            text = "abcdefghijkl"
            for fields, rest in (
                ({}, b"abcdefgh"),
                ({"truncate": "START"}, b"efghijkl"),
                ({"truncate": "START", "max_tokens": 2}, b"kl"),
                ({"max_tokens": 100}, b"abcdefgh"),
            ):
                assert (await server.post("/v2/embed", {"texts": [text], **fields})).status_code == 200
                assert bytes(server.requests()[-1].prompt_token_ids) == rest

    run(main())


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"texts": None}, "texts", "give texts or inputs"),
        ({"texts": []}, "texts", "at least one"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts", "one of them"),
        ({"texts": ["a"] * 2049}, "texts", "at most 2048"),
        ({"texts": ["a", ""]}, "texts[1]", "holds no tokens"),
        ({"texts": ["a" * 20], "truncate": "NONE"}, "texts[0]", "maximum context length"),
        ({"truncate": "NONE", "max_tokens": 5}, "max_tokens", "Leave one out"),
        ({"truncate": "MIDDLE"}, "truncate", "must be one of START, END, NONE"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"embedding_types": ["int8"]}, "embedding_types", "must be one of float, binary, ubinary, base64"),
        ({"embedding_types": ["binary"]}, "embedding_types", "multiple of 8"),
        ({"output_dimension": 5}, "output_dimension", "4 numbers"),
        ({"texts": None, "images": ["data:"]}, "images", "not supported"),
        ({"texts": None, "inputs": [{}]}, "inputs[0]", "list of parts"),
        ({"texts": None, "inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content[0]", "the type text"),
        ({"texts": None, "inputs": [{"content": [{"type": "text"}]}]}, "inputs[0].content[0].text", "required"),
    ],
)
def test_refused(run, served, fields, param, words):
    async def main():
        async with served(max_model_len=16) as server:
            response = await server.post("/v2/embed", {"texts": ["a"], **fields})
            error = response.json()["error"]
            assert response.status_code == 400, error
            assert error["param"] == param
            assert words in error["message"]

    run(main())
