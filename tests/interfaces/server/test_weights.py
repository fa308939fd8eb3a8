"""/v1/admin/update_weights: a file below weights_root, and nothing beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx2 as httpx

from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.gateway import create_app
from quire.testing.tiny_checkpoints import make_checkpoint

UPDATE = "/v1/admin/update_weights"
COMPLETION = {"prompt": "a quire", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_the_server_answers_as_the_other_model(tmp_path: Path, run: Any):
    first, second = (make_checkpoint(tmp_path / name, "llama", seed=seed) for name, seed in (("a", 1), ("b", 2)))
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(second / "model.safetensors", root / "v2.safetensors")
    (root / "stray.safetensors").symlink_to(first / "model.safetensors")
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "engine_process": False, "max_model_len": 128}

    async def text_of(path: Path, names: list[str]) -> list[str]:
        texts = []
        async with AsyncLLM(str(path), **options) as engine:
            app = create_app(engine, is_local=True, weights_root=str(root))
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
                for name in ["", *names]:
                    if name:
                        answer = await http.post(UPDATE, json={"path": name})
                        assert answer.status_code == (200 if name == "v2.safetensors" else 400), answer.text
                    texts.append((await http.post("/v1/completions", json=COMPLETION)).json()["choices"][0]["text"])
        return texts

    async def main() -> None:
        (expected,) = await text_of(second, [])
        before, *refused, after = await text_of(
            first, ["../a/model.safetensors", "stray.safetensors", str(root / "v2.safetensors"), "v2.safetensors"]
        )
        assert refused == [before] * 3
        assert before != expected
        assert after == expected

    run(main())


def test_without_a_root_none_are_taken(tmp_path: Path, run: Any):
    path = make_checkpoint(tmp_path / "a", "llama")

    async def main() -> None:
        async with AsyncLLM(str(path), dtype="float32", num_threads=1, engine_process=False) as engine:
            app = create_app(engine, is_local=True, weights_root=None)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
                answer = await http.post(UPDATE, json={"path": "v2.safetensors"})
                assert answer.status_code == 400
                assert "--weights-root" in answer.text

    run(main())
