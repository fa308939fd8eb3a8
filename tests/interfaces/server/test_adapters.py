"""Adapters over HTTP: named as the model in every endpoint, loaded and unloaded while others stream, and no way out of
adapter_root."""

import asyncio
import contextlib
import json
import shutil

import httpx2 as httpx
import pytest

from quire import AsyncLLM, LoRARequest, SamplingParams
from quire.interfaces.gateway import create_app
from quire.testing.tiny_adapters import make_adapter
from quire.testing.tiny_checkpoints import make_checkpoint

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
COMPLETION = {"prompt": [5, 6, 7, 8, 9, 10, 11, 12], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A checkpoint and a folder of adapters."""
    folder = tmp_path_factory.mktemp("served")
    base = make_checkpoint(folder / "base", "llama")
    root = folder / "root"
    for number in range(3):
        make_adapter(root / f"a{number}", base, seed=number)
    make_adapter(folder / "outside", base, seed=9)
    return base, root


@contextlib.asynccontextmanager
async def served(house, *, options=None, **engine_options):
    base, root = house
    values = {"served_model_name": "base", "dtype": "float32", "device": "cpu", "num_threads": 1, "enable_lora": True}
    values |= {"engine_process": False, "packed_weights_cache": 0, "max_model_len": 200}
    async with AsyncLLM(str(base), **{**values, **engine_options}) as engine:
        app = create_app(engine, is_local=True, **{"adapter_root": str(root), **(options or {})})
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            yield http


async def text_of(http, model, **fields):
    answer = await http.post("/v1/completions", json={**COMPLETION, "model": model, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def test_an_adapter_is_loaded_listed_used_and_unloaded(house, run):
    async def main():
        async with served(house) as http:
            assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["base"]
            assert (await http.post("/v1/completions", json={**COMPLETION, "model": "sql"})).status_code == 404
            loaded = await http.post(LOAD, json={"lora_name": "sql", "lora_path": "a0"})
            assert loaded.json() == {"object": "lora_adapter", "name": "sql", "status": "success"}
            mistyped = await http.post("/v1/completions", json={**COMPLETION, "model": "slq"})
            assert mistyped.json()["error"]["message"].endswith("This server has `base`, `sql`.")
            models = (await http.get("/v1/models")).json()["data"]
            assert [(one["id"], one["parent"]) for one in models] == [("base", None), ("sql", "base")]
            assert (await http.get("/v1/models/sql")).json()["parent"] == "base"
            assert 'quire:adapters_loaded{model_name="base"} 1.0' in (await http.get("/metrics")).text
            assert await text_of(http, "sql") != await text_of(http, "base")
            again = await http.post(LOAD, json={"lora_name": "sql", "lora_path": "a1"})
            assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_exists")
            assert "has already been loaded" in again.text
            first = await text_of(http, "sql")
            assert (
                await http.post(LOAD, json={"lora_name": "sql", "lora_path": "a1", "load_inplace": True})
            ).is_success
            assert await text_of(http, "sql") != first
            gone = await http.post(UNLOAD, json={"lora_name": "sql"})
            assert gone.json() == {"object": "lora_adapter.deleted", "name": "sql", "deleted": True}
            missing = await http.post("/v1/completions", json={**COMPLETION, "model": "sql"})
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
            assert (await http.post(UNLOAD, json={"lora_name": "sql"})).status_code == 404
            assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["base"]

    run(main())


def test_every_endpoint_takes_its_name_as_the_model(house, run):
    async def main():
        _, root = house
        async with served(
            house, lora_modules=(f"sql={root}/a0", json.dumps({"name": "x", "path": f"{root}/a1"}))
        ) as http:
            hello = [{"role": "user", "content": "Hello"}]
            fields = {"temperature": 0}
            for path, body in (
                ("/v1/chat/completions", {"messages": hello, "max_tokens": 8, "ignore_eos": True}),
                ("/v1/completions", {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}),
                ("/v1/responses", {"input": "Hello", "max_output_tokens": 8, "store": False}),
                ("/v1/messages", {"messages": hello, "max_tokens": 8}),
            ):
                answers = {}
                for model in ("base", "sql", "x"):
                    answer = await http.post(path, json={**body, **fields, "model": model})
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["model"] == model
                    content = answer.json()
                    kept = content.get("choices") or content.get("output") or content.get("content")
                    for one in kept:
                        one.pop("id", None)
                    answers[model] = json.dumps(kept)
                assert len(set(answers.values())) == 3, path
                wrong = await http.post(path, json={**body, "model": "nobody"})
                assert wrong.status_code == 404
            tokens = await http.post("/tokenize", json={"model": "sql", "prompt": "Hello"})
            assert tokens.status_code == 200

    run(main())


def test_vectors_and_turns_of_a_session_take_it_too(house, run):
    async def main():
        _, root = house
        async with served(house, lora_modules=(f"sql={root}/a0",)) as http:
            answers = {}
            for model in ("base", "sql"):
                vector = await http.post("/v1/embeddings", json={"model": model, "input": [5, 6, 7, 8]})
                assert vector.status_code == 200, vector.text
                session = (await http.post("/v1/sessions")).json()["id"]
                body = {**COMPLETION, "model": model}
                turn = await http.post(f"/v1/sessions/{session}/completions", json=body)
                assert turn.status_code == 200, turn.text
                assert turn.json()["model"] == vector.json()["model"] == model
                text = turn.json()["choices"][0]["text"]
                assert text == await text_of(http, model)
                answers[model] = (vector.json()["data"][0]["embedding"], text)
                wrong = await http.post(f"/v1/sessions/{session}/completions", json={**body, "model": "nobody"})
                assert wrong.status_code == 404
            assert answers["base"][0] != answers["sql"][0]
            assert answers["base"][1] != answers["sql"][1]
            wrong = await http.post("/v1/embeddings", json={"model": "nobody", "input": [5, 6, 7, 8]})
            assert wrong.status_code == 404

    run(main())


def test_a_batch_may_name_an_adapter(house, run):
    async def main():
        _, root = house
        async with served(house, lora_modules=(f"sql={root}/a0",)) as http:
            lines = [
                {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": {**COMPLETION, "model": model}}
                for model in ("base", "sql", "nobody")
            ]
            data = "\n".join(map(json.dumps, lines)).encode()
            file = (await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})).json()
            asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = (await http.post("/v1/batches", json=asked)).json()
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.02)
                batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
            assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
            content = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
            found = {}
            for line in map(json.loads, content.splitlines()):
                found[line["custom_id"]] = line["response"]["body"]["choices"][0]["text"]
            assert found == {model: await text_of(http, model) for model in ("base", "sql")}

    run(main())


def test_loading_and_unloading_while_others_stream(house, run):
    """Those that run keep their tokens, and an adapter that is unloaded in the middle of a request is its own to the
    end; then its memory is given back."""

    async def main():
        async with served(house, max_loras=2, max_model_len=160) as http:
            await http.post(LOAD, json={"lora_name": "a0", "lora_path": "a0"})
            long = {"max_tokens": 100, "ignore_eos": True}
            expected = {model: await text_of(http, model, **long) for model in ("base", "a0")}

            async def streamed(model):
                pieces = []
                body = {**COMPLETION, **long, "model": model, "stream": True}
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            pieces.append(json.loads(line[6:])["choices"][0]["text"])
                return "".join(pieces)

            streams = [asyncio.create_task(streamed(model)) for model in ("base", "a0", "base", "a0")]
            await asyncio.sleep(0.05)
            assert (await http.post(UNLOAD, json={"lora_name": "a0"})).is_success
            for number in range(6):
                name = f"new{number}"
                assert (await http.post(LOAD, json={"lora_name": name, "lora_path": f"a{number % 3}"})).is_success
                await text_of(http, name, max_tokens=2)
                assert (await http.post(UNLOAD, json={"lora_name": name})).is_success
            texts = await asyncio.gather(*streams)
            assert texts == [expected[model] for model in ("base", "a0", "base", "a0")]
            assert (await http.post(LOAD, json={"lora_name": "a0", "lora_path": "a0"})).is_success
            assert await text_of(http, "a0", **long) == expected["a0"]

    run(main())


WAYS_OUT = [
    "../outside", "a0/../../outside", "/etc", "", ".", "..", "a0/..", "nothing", "link", "inner", "a\0b", "x" * 5000,
    "file:///proc/self/environ", "a0/adapter_config.json", "circle", "~", "a0\n",
]  # fmt: skip


def test_nothing_beside_the_root_is_read(house, run, tmp_path):
    base, root = house
    own = tmp_path / "root"
    shutil.copytree(root, own)
    outside = make_adapter(tmp_path / "outside", base, seed=5)
    (own / "link").symlink_to(outside)
    (own / "inner").mkdir()
    for file in outside.iterdir():
        (own / "inner" / file.name).symlink_to(file)
    (own / "circle").symlink_to(own / "circle")

    async def main():
        async with served(house, options={"adapter_root": str(own)}) as http:
            for path in (*WAYS_OUT, str(own / "a0" / ".." / ".." / "outside"), str(outside)):
                answer = await http.post(LOAD, json={"lora_name": "sql", "lora_path": path})
                assert answer.status_code == 404, path
                assert str(tmp_path) not in answer.json()["error"]["message"].replace(path, "")
            assert (await http.post(LOAD, json={"lora_name": "whole", "lora_path": str(own / "a0")})).is_success
            assert (await http.post(LOAD, json={"lora_name": "sql", "lora_path": "./a0"})).is_success
        async with served(house, options={"adapter_root": None}) as http:
            answer = await http.post(LOAD, json={"lora_name": "sql", "lora_path": "a0"})
            assert (answer.status_code, "--adapter-root" in answer.text) == (400, True)

    run(main())


def test_what_is_broken_is_one_line_and_costs_nothing(house, run, tmp_path):
    _, root = house
    own = tmp_path / "root"
    shutil.copytree(root, own)
    (own / "a1" / "adapter_model.safetensors").write_bytes(b"\xff" * 1000)
    (own / "a2" / "adapter_config.json").write_text("{")

    async def main():
        async with served(house, options={"adapter_root": str(own)}, max_loras=1, max_cpu_loras=1) as http:
            for _ in range(3):
                for name, status in (("a1", 400), ("a2", 503)):
                    answer = await http.post(LOAD, json={"lora_name": name, "lora_path": name})
                    assert answer.status_code == status, answer.text
                    assert "\n" not in answer.json()["error"]["message"]
            for name in ("base", "", " a", "x" * 200, "a\nb"):
                assert (await http.post(LOAD, json={"lora_name": name, "lora_path": "a0"})).status_code == 400, name
            assert (await http.post(LOAD, json={"lora_name": "a0", "lora_path": "a0"})).is_success
            await text_of(http, "a0")

    run(main())


def test_those_that_left_memory_come_back_unless_their_files_are_others(house, run, tmp_path):
    _, root = house
    own = tmp_path / "root"
    shutil.copytree(root, own)

    async def ask(http, model):
        answer = await http.post("/v1/completions", json={**COMPLETION, "model": model})
        return answer.status_code, answer.text

    async def main():
        async with served(house, options={"adapter_root": str(own)}, max_loras=1, max_cpu_loras=1) as http:
            names = ["a0", "a1", "a2"]
            for name in names:
                assert (await http.post(LOAD, json={"lora_name": name, "lora_path": name})).is_success
            models = (await http.get("/v1/models")).json()["data"]
            assert [one["id"] for one in models] == ["base", *names]
            alone = [await text_of(http, name) for name in names]
            assert len(set(alone)) == 3
            together = await asyncio.gather(*[text_of(http, name) for name in names * 4])
            assert together == alone * 4
            metrics = (await http.get("/metrics")).text
            assert 'quire:adapters_loaded{model_name="base"} 1.0' in metrics
            assert "quire:adapter_evictions_total" in metrics
            # what is named next reads files that have changed, then files that are gone
            await text_of(http, "a2")
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copy(own / "a1" / file, own / "a0" / file)
            answers = await asyncio.gather(ask(http, "a0"), ask(http, "a1"), ask(http, "base"), ask(http, "a2"))
            assert [status for status, _ in answers] == [400, 200, 200, 200]
            message = json.loads(answers[0][1])["error"]["message"]
            assert message.startswith("a0: its files have changed since it was loaded. Load it again")
            shutil.rmtree(own / "a0")
            status, text = await ask(http, "a0")
            assert (status, "adapter_config.json: is not there" in text) == (400, True)
            shutil.copytree(root / "a0", own / "a0")
            assert await text_of(http, "a0") == alone[0]

    run(main())


def test_a_load_that_is_given_up_leaves_nothing(house, run):
    """Whenever that happens: before its number is known, and behind that."""
    base, root = house

    async def main():
        options = {"served_model_name": "base", "dtype": "float32", "device": "cpu", "num_threads": 1}
        lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "engine_process": False}
        async with AsyncLLM(str(base), **options, **lora, packed_weights_cache=0, max_model_len=200) as engine:
            for num_turns in range(1, 12):
                load = asyncio.create_task(engine.load_adapter("given up", str(root / "a0")))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                load.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await load
                if not load.cancelled():
                    await engine.unload_adapter("given up")
                assert await engine.adapters() == []
            await engine.load_adapter("a0", str(root / "a0"))

    run(main())


def test_only_the_administrator_may(house, run):
    async def main():
        options = {"api_keys": ("user",), "admin_api_key": "admin"}
        async with served(house, options=options) as http:
            body = {"lora_name": "sql", "lora_path": "a0"}
            for path in (LOAD, UNLOAD):
                assert (await http.post(path, json=body)).status_code == 401
                denied = await http.post(path, json=body, headers={"authorization": "Bearer user"})
                assert denied.status_code in (401, 403)
            allowed = await http.post(LOAD, json=body, headers={"authorization": "Bearer admin"})
            assert allowed.is_success
            roots = {}
            for key in ("user", "admin"):
                answer = await http.get("/v1/models/sql", headers={"authorization": f"Bearer {key}"})
                roots[key] = answer.json()["root"]
            assert roots == {"user": "sql", "admin": str((house[1] / "a0").resolve())}

    run(main())


def test_an_engine_without_adapters_says_so(house, run):
    async def main():
        async with served(house, enable_lora=False) as http:
            answer = await http.post(LOAD, json={"lora_name": "sql", "lora_path": "a0"})
            assert (answer.status_code, "enable_lora" in answer.text) == (400, True)
            assert (await http.post("/v1/completions", json={**COMPLETION, "model": "sql"})).status_code == 404

    run(main())


def test_a_new_engine_loads_them_again(house, run):
    """In a process of its own, where an adapter goes and comes by messages alone."""
    base, root = house

    async def main():
        options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "packed_weights_cache": 0}
        async with AsyncLLM(str(base), enable_lora=True, engine_process=True, max_model_len=100, **options) as engine:
            adapter = await engine.load_adapter("sql", str(root / "a0"))
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

            async def tokens(lora_request):
                stream = engine.generate({"prompt_token_ids": COMPLETION["prompt"]}, params, lora_request=lora_request)
                return [output async for output in stream][-1].outputs[0].token_ids

            request = LoRARequest("sql", 1, adapter.path)
            before = await tokens(request)
            assert before != await tokens(None)
            await engine.restart()
            assert [one.name for one in await engine.adapters()] == ["sql"]
            assert await tokens(request) == before

    run(main())
