"""/v1/embeddings on a fake engine: forms of the input, formats of the answer, what is refused and what goes wrong."""

import asyncio
import base64
import json
from types import SimpleNamespace

import numpy as np
import openai
import pytest

from quire.errors import RequestError
from quire.interfaces.server.openai.embeddings import EmbeddingRequest, EmbeddingWork
from quire.interfaces.server.openai.pooling_work import PoolingUsage
from quire.interfaces.server.openai.vector_bytes import as_bytes
from quire.outputs import EmbeddingOutput, EmbeddingRequestOutput
from quire.testing.fake_core import vector_of


def unit(prompt: list[int], pooling: str = "last", dimensions: int | None = None) -> np.ndarray:
    vector = vector_of(prompt, pooling)[:dimensions].astype(np.float64)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def numbers(response) -> list[np.ndarray]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    assert all(entry["object"] == "embedding" for entry in data)
    return [np.array(entry["embedding"], dtype=np.float32) for entry in data]


async def embed(server, given, **fields):
    return await server.post("/v1/embeddings", {"input": given, **fields})


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_the_four_forms_of_input(run, served, given, prompts):
    async def main():
        async with served() as server:
            response = await embed(server, given, user="somebody")
            for found, prompt in zip(numbers(response), prompts, strict=True):
                assert np.array_equal(found, unit(prompt))
            body, count = response.json(), sum(map(len, prompts))
            assert (body["object"], body["model"]) == ("list", "byte-model")
            assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
            assert [request.prompt_token_ids for request in server.requests()] == prompts

    run(main())


def test_float_and_base64_are_the_same_numbers(run, served):
    async def main():
        async with served() as server:
            plain = numbers(await embed(server, ["ab", "xyz"], encoding_format="float"))
            packed = (await embed(server, ["ab", "xyz"], encoding_format="base64")).json()["data"]
            for one, other in zip(plain, packed, strict=True):
                assert np.frombuffer(base64.b64decode(other["embedding"]), "<f4").tolist() == one.tolist()

    run(main())


@pytest.mark.parametrize("order", ["little", "big", "native"])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_the_bytes_of_numbers(name, order):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(name, name))
    vector = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    expected = torch.from_numpy(vector).to(dtype).view(bits).numpy()
    expected = expected.byteswap() if order == "big" else expected
    assert as_bytes(vector, name, order) == expected.tobytes()


def test_vectors_as_bytes(run, served):
    async def main():
        async with served() as server:
            whole = numbers(await embed(server, ["ab", "c"]))
            answer = await embed(server, ["ab", "c"], encoding_format="bytes")
            described = json.loads(answer.headers["metadata"])
            assert [(one["index"], one["shape"]) for one in described["data"]] == [(0, [4]), (1, [4])]
            for one, vector in zip(described["data"], whole, strict=True):
                assert np.frombuffer(answer.content[one["start"] : one["end"]], "<f4").tolist() == vector.tolist()
            alone = await embed(server, ["ab", "c"], encoding_format="bytes_only")
            assert "metadata" not in alone.headers
            assert alone.content == answer.content
            refused = await server.post("/invocations", {"input": "a", "encoding_format": "bytes"})
            assert refused.json()["error"]["param"] == "encoding_format"
            refused = await embed(server, ["a"] * 513, encoding_format="bytes")
            assert "bytes_only" in refused.json()["error"]["message"]

    run(main())


def test_the_places_of_vectors_fit_in_a_header():
    output = EmbeddingRequestOutput("1", None, [], EmbeddingOutput(np.zeros(2**14, np.float32)))
    usage = PoolingUsage(2**20, 2**20)
    work = EmbeddingWork(SimpleNamespace(usage=usage), EmbeddingRequest(), SimpleNamespace(name="Große"))
    described = work._described([output] * 512, [bytes(2**16)] * 512)
    assert described.isascii()
    assert len(described) < 2**16
    assert json.loads(described)["model"] == "Große"


def test_the_vector_of_a_chat(run, served):
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]

    async def main():
        async with served() as server:
            render = server.engine.renderer.render_prompt
            for fields in (
                {"add_generation_prompt": False},
                {"add_generation_prompt": True},
                {"add_generation_prompt": False, "continue_final_message": True},
            ):
                answer = await server.post("/v1/embeddings", {"messages": messages, **fields})
                assert answer.json()["id"].startswith("embd-")
                assert server.requests()[-1].prompt_token_ids == render(messages, **fields).token_ids
            plain = await server.post("/v1/embeddings", {"messages": messages})
            invoked = await server.post("/invocations", {"messages": messages, "encoding_format": "float"})
            assert invoked.json()["data"] == plain.json()["data"]
            both = {"continue_final_message": True, "add_generation_prompt": True}
            refused = await server.post("/v1/embeddings", {"messages": messages, **both})
            assert "Cannot set both" in refused.json()["error"]["message"]

    run(main())


def test_dimensions_length_and_pooling(run, served):
    async def main():
        async with served() as server:
            [cut] = numbers(await embed(server, "abc", dimensions=2))
            assert np.array_equal(cut, unit([97, 98, 99], dimensions=2))
            assert np.linalg.norm(cut) == pytest.approx(1)
            [raw] = numbers(await embed(server, "abc", normalize=False, pooling="mean"))
            [newer] = numbers(await embed(server, "abc", use_activation=False, pooling="mean"))
            assert np.array_equal(newer, raw)
            both = await embed(server, "abc", normalize=True, use_activation=False)
            assert both.json()["error"]["param"] == "use_activation"
            assert np.array_equal(raw, vector_of([97, 98, 99], "mean"))
            assert [request.pooling for request in server.requests()] == ["last", "mean", "mean"]

    run(main())


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "empty list"),
        ({"input": [""]}, "input[0]", "input[0]: a text holds no tokens"),
        ({"input": ["a", ""]}, "input[1]", "input[1]: a text holds no tokens"),
        ({"input": [[1], []]}, "input[1]", "input[1]: must be a text, a token id or"),
        ({"input": ["a", [1, "b"]]}, "input[1]", "input[1]: must be a text, a token id or"),
        ({"input": ""}, "input", "holds no tokens"),
        ({"input": ["a", 1]}, "input", "must be a text"),
        ({"input": [[1], "a"]}, "input", "must be a text"),
        ({"input": [True]}, "input[0]", "must be a text"),
        ({"input": [1, 1.5]}, "input[1]", "must be a text"),
        ({"input": 5}, "input", "must be"),
        ({"input": {}}, "input", "must be"),
        ({}, "input", "required"),
        ({"input": [300]}, "input", "out of vocabulary (0 to 260)"),
        ({"input": [[1], [-1]]}, "input[1]", "input[1]: token id -1 is out of vocabulary"),
        ({"input": [10**30]}, "input", "vocabulary"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "must be one of float, base64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1"),
        ({"input": "a", "dimensions": 5}, "dimensions", "4 numbers"),
        ({"input": "a", "dimensions": "4"}, "dimensions", "whole number"),
        ({"input": "a", "pooling": "cls"}, "pooling", "first token of this model"),
        ({"input": "a", "truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens", "greater than max_model_len"),
        ({"input": "a", "messages": []}, "messages", "not together with input"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype", "must be one of float32"),
        ({"input": "a", "endianness": "middle"}, "endianness", "must be one of little"),
        ({"input": "a", "priority": 2**40}, "priority", "between"),
        ({"input": "a", "encoding_formt": "float"}, "encoding_formt", "encoding_format"),
    ],
)
def test_what_cannot_be_embedded(run, served, fields, param, words):
    async def main():
        async with served() as server:
            response = await server.post("/v1/embeddings", fields)
            error = response.json()["error"]
            assert response.status_code == 400, error
            # where only vLLM has the field, what its clients know
            assert error["type"] == (
                "BadRequestError" if "truncate_prompt_tokens" in fields else "invalid_request_error"
            )
            assert error["param"] == param
            assert words in error["message"]
            # the engine is as before
            assert (await embed(server, "a")).status_code == 200

    run(main())


def test_what_reaches_the_engine(run, served):
    async def main():
        async with served() as server:
            await embed(server, ["a", "b"], priority=3, cache_salt="mine")
            asked = [(request.priority, request.cache_salt, request.is_final) for request in server.requests()]
            assert asked == [(3, "mine", True)] * 2

    run(main())


def test_an_input_may_fill_the_model_and_no_more(run, served):
    async def main():
        async with served(max_model_len=16) as server:
            assert (await embed(server, "x" * 16)).status_code == 200
            long = "x" * 17, [5] * 17, "x" * 3000
            cases = [(one, "input") for one in long] + [(["a", "b", one], "input[2]") for one in (long[0], long[2])]
            for given, name in [*cases, ([[5], long[1]], "input[1]")]:
                response = await embed(server, given)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
                assert error["param"] == name
                assert f"your {name}" in error["message"]
                assert error["message"].endswith(f"Please reduce the length of the {name}.")
            assert (await embed(server, "a", model="another")).status_code == 404

    run(main())


def test_what_the_engine_has_no_room_for_is_named(run, served):
    async def main():
        async with served() as server:
            embed_one = server.engine.embed

            async def refusing(prompt, *args, **options):
                if len(prompt.token_ids) == 3:
                    raise RequestError("prompt: too much. Shorten the prompt.", param="prompt")
                return await embed_one(prompt, *args, **options)

            server.engine.embed = refusing
            for given, name in ((["a", "bb", "ccc"], "input[2]"), ([[1, 2, 3], [4]], "input[0]"), ("ccc", "input")):
                error = (await embed(server, given)).json()["error"]
                assert (error["param"], error["message"]) == (name, f"{name}: too much. Shorten the {name}.")

    run(main())


def test_one_that_fails_fails_the_request_and_a_client_that_leaves_aborts_it(run, served):
    async def main():
        async with served() as server:
            server.fake.failures[0] = "it broke"
            response = await embed(server, ["a", "b"])
            assert response.status_code == 500
            assert "it broke" not in response.text
            server.fake.failures.clear()
            server.fake.hold(0)
            asking = asyncio.ensure_future(embed(server, ["a", "b"]))
            while len(server.fake.running) < 2:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert not server.fake.running
            assert len(server.fake.aborted) == 2

    run(main())


def test_a_request_takes_no_more_than_its_part_of_the_queue(run, served):
    async def main():
        async with served(max_num_queued_requests=4) as server:
            room = server.services.room
            server.fake.hold(0)
            asking = asyncio.ensure_future(embed(server, [[number] for number in range(20)]))
            while len(server.fake.running) < 4:
                await asyncio.sleep(0)
            refused = await embed(server, "a")
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            assert len(server.requests()) == room.num_requests == 4
            server.fake.release()
            for number, found in enumerate(numbers(await asking)):
                assert np.array_equal(found, unit([number]))
            assert room.num_requests == room.num_tokens == 0
            assert room.report()[0].num_prompt_tokens == 20
            assert (await embed(server, "a")).status_code == 200

    run(main())


def test_a_request_that_waits_too_long_is_ended(run, served):
    async def main():
        async with served(max_queue_seconds=0.05) as server:
            server.fake.hold(0)
            response = await embed(server, ["a", "b"])
            assert response.status_code == 503
            assert "had not begun" in response.json()["error"]["message"]
            assert not server.fake.running

    run(main())


def test_what_metrics_say_of_it(run, served):
    async def main():
        async with served() as server:
            await embed(server, ["abcd", "ef"])
            text = (await server.http.get("/metrics")).text
        of = '{model_name="byte-model"}'
        for line in (
            f"quire:prompt_tokens_total{of} 6.0",
            f"quire:generation_tokens_total{of} 0.0",
            'quire:request_success_total{finished_reason="stop",model_name="byte-model"} 2.0',
            f"quire:request_queue_time_seconds_count{of} 2.0",
            f"quire:request_generation_tokens_count{of} 0.0",
        ):
            assert line in text

    run(main())


def test_the_official_client(run, served, on_a_socket):
    async def main():
        async with served() as server, on_a_socket(server) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            # it asks for base64 by itself, and decodes it
            found = await client.embeddings.create(input=["ab", "c"], model="byte-model", dimensions=3)
            plain = await client.embeddings.create(
                input=[[97, 98], [99]], model="byte-model", dimensions=3, encoding_format="float", user="me"
            )
            assert [entry.embedding for entry in found.data] == [entry.embedding for entry in plain.data]
            assert [entry.index for entry in found.data] == [0, 1]
            assert found.usage.prompt_tokens == 3
            with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
                await client.embeddings.create(input=[10**6], model="byte-model")
            await client.close()

    run(main())
