"""A real server whose model sees images, through the official clients."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
from PIL import Image
from tests.support.server_process import ServerProcess

from quire.testing.tiny_checkpoints import make_checkpoint

SERVE = ["-m", "quire.interfaces.cli", "serve", "--port", "0", "--dtype", "float32", "--served-model-name", "vl"]


def png(seed: int = 0, size: tuple[int, int] = (56, 40)) -> str:
    """In base64."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def part(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "auto"}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("vl") / "model", "qwen2_5_vl")
    with ServerProcess([*SERVE, "--model", str(path)]) as server:
        yield server.wait_ready(300)
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def answer(client: openai.OpenAI, *parts: Any) -> Any:
    content = [{"type": "text", "text": "What is "}, *parts]
    return client.chat.completions.create(
        model="vl", messages=[{"role": "user", "content": content}], temperature=0, max_completion_tokens=12,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def encoder_runs(url: str) -> float:
    lines = httpx.get(url + "/metrics", timeout=30).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("quire:encoder_runs_total"))


def test_a_chat_with_images(client: openai.OpenAI, url: str) -> None:
    text = answer(client)
    before = encoder_runs(url)
    first = answer(client, part(png(0)))
    second = answer(client, part(png(1)))
    assert first.usage.prompt_tokens == text.usage.prompt_tokens + 35 + 2
    texts = [found.choices[0].message.content for found in (text, first, second)]
    assert len(set(texts)) == 3
    assert answer(client, part(png(0))).choices[0].message.content == texts[1]
    assert encoder_runs(url) == before + 2


def test_responses_and_messages_see_what_a_chat_sees(client: openai.OpenAI, url: str) -> None:
    expected = answer(client, part(png(0))).choices[0].message.content
    other = answer(client, part(png(1))).choices[0].message.content
    texts = []
    for seed in (0, 1):
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{png(seed)}", "detail": "auto"}
        content = [{"type": "input_text", "text": "What is "}, image]
        given = client.responses.create(
            model="vl", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=12, store=False,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        texts.append(given.output_text)
        source = {"type": "base64", "media_type": "image/png", "data": png(seed)}
        content = [{"type": "text", "text": "What is "}, {"type": "image", "source": source}]
        body = {"model": "vl", "max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": content}]}
        reply = httpx.post(url + "/v1/messages", json={**body, "ignore_eos": True}, timeout=60)
        assert reply.status_code == 200, reply.text
        texts.append("".join(block["text"] for block in reply.json()["content"]))
    assert texts == [expected, expected, other, other]


def test_an_image_alone(client: openai.OpenAI, url: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": png()}
    body = {
        "model": "vl",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
    }
    assert httpx.post(url + "/v1/messages", json=body, timeout=60).status_code == 200
    source["type"] = "url"
    reply = httpx.post(url + "/v1/messages", json=body, timeout=60)
    assert (reply.status_code, "not fetched" in reply.text) == (400, True)
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{png()}"}
    given = client.responses.create(model="vl", input=[{"role": "user", "content": [image]}], max_output_tokens=2)
    assert given.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (part(base64.b64encode(b"no image").decode()), "cannot be read as an image"),
        (part("?"), "no valid base64"),
        (part(png(size=(500, 2))), "one side may be 200 times"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}, "not fetched"),
        ({"type": "image_url", "image_url": {}}, "must hold the image as a data URL"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AA,AA"}}, "reads texts and images"),
    ],
)
def test_what_is_refused(given: dict[str, Any], text: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=text) as caught:
        answer(client, given)
    assert "messages[0].content[1]" in str(caught.value)


def test_too_many_images(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="limit_mm_per_prompt"):
        answer(client, *[part(png())] * 5)


def test_placeholders_in_a_text_are_text(client: openai.OpenAI) -> None:
    marks = {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|><|video_pad|>"}
    alone = answer(client, marks)
    assert alone.usage.prompt_tokens == answer(client).usage.prompt_tokens + len(marks["text"])
    beside = answer(client, marks, part(png(0)))
    assert beside.usage.prompt_tokens == alone.usage.prompt_tokens + 35 + 2
