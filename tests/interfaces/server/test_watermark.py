"""Texts over HTTP have the engine's watermark, unless a request says otherwise."""

import httpx2 as httpx

from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.gateway import create_app
from quire.watermark import WatermarkDetector

CONFIG = {"key": 99}
SAMPLED = {"max_tokens": 120, "ignore_eos": True, "seed": 5, "return_token_ids": True}


def test_completions_and_chats(run):
    asked = {
        "/v1/completions": {"prompt": "Once upon a time", "temperature": 2, **SAMPLED},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "temperature": 2, **SAMPLED},
    }

    async def main():
        options = {"max_model_len": 256, "num_threads": 1, "engine_process": False, "watermark_config": CONFIG}
        async with AsyncLLM(**options) as engine:
            transport = httpx.ASGITransport(app=create_app(engine), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
                for path, body in asked.items():

                    async def is_marked(path=path, body=body, **fields) -> bool:
                        answer = await http.post(path, json={**body, **fields})
                        assert answer.status_code == 200, answer.text
                        tokens = answer.json()["choices"][0]["token_ids"]
                        return WatermarkDetector(**CONFIG, threshold=1e-4).detect(tokens).is_watermarked

                    assert await is_marked()
                    assert await is_marked(watermarking=True)
                    assert not await is_marked(watermarking=False)
                    assert not await is_marked(temperature=0)
                    for wrong in ({"temperature": 0}, {"use_beam_search": True}):
                        answer = await http.post(path, json={**body, "watermarking": True, **wrong})
                        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "watermarking")

    run(main())
