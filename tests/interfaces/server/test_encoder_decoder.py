"""Models that read a prompt and write another text, through the official client."""

import asyncio

import httpx2 as httpx
import openai
import pytest

from quire import AsyncLLM
from quire.interfaces.server.app import create_app
from quire.testing.source_checkpoints import make_source_checkpoint

PROMPTS = ["translate: house", "a", "summarize: " + "so it goes. " * 8]


def test_completions_of_prompts_that_an_encoder_reads(tmp_path):
    path = make_source_checkpoint(tmp_path / "t5")

    async def main():
        options = {"device": "cpu", "dtype": "float32", "num_threads": 1, "engine_process": False}
        async with AsyncLLM(str(path), **options) as engine:
            transport = httpx.ASGITransport(create_app(engine))
            async with httpx.AsyncClient(transport=transport, base_url="http://quire") as http:
                client = openai.AsyncOpenAI(api_key="none", base_url="http://quire/v1", http_client=http, max_retries=0)
                await check(client, engine.config.served_model_name)

    asyncio.run(main())


async def check(client: openai.AsyncOpenAI, model: str) -> None:
    asked = {"model": model, "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    whole = await client.completions.create(prompt=PROMPTS, **asked)
    # bytes
    assert whole.usage.prompt_tokens == sum(map(len, PROMPTS))
    assert whole.usage.completion_tokens == 8 * len(PROMPTS)
    assert len({choice.text for choice in whole.choices}) == len(PROMPTS)
    for prompt, choice in zip(PROMPTS, whole.choices, strict=True):
        pieces = [piece async for piece in await client.completions.create(prompt=prompt, stream=True, **asked)]
        assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == choice.text
    echoed = await client.completions.create(prompt=PROMPTS[0], echo=True, **asked)
    assert echoed.choices[0].text == PROMPTS[0] + whole.choices[0].text
    several = await client.completions.create(prompt=PROMPTS[0], n=2, logprobs=2, **asked)
    assert [choice.text for choice in several.choices] == [whole.choices[0].text] * 2
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.BadRequestError, match="its encoder makes no vectors"):
        await client.embeddings.create(model=model, input="hello")
