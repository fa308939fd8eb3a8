"""Images through the official client, with a data URL."""

import base64
import io

import httpx2 as httpx
import numpy as np
import openai
import pytest
from PIL import Image
from tests.support.server_process import ServerProcess

from quire.testing.image_checkpoints import make_image_checkpoint


def data_url(seed: int) -> str:
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "png")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def chat_with(url: str) -> list[dict]:
    text = {"type": "text", "text": "What is this?"}
    return [{"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": url}}]}]


def video_url(*levels: int) -> str:
    frames = []
    for level in levels:
        stream = io.BytesIO()
        Image.new("RGB", (56, 84), (level,) * 3).save(stream, "jpeg")
        frames.append(base64.b64encode(stream.getvalue()).decode())
    return "data:video/jpeg;base64," + ",".join(frames)


def check_videos(client: openai.OpenAI, model: str) -> None:
    """Frames of JPEG, which need no decoder of files."""

    def ask(*urls: str):
        parts = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "<|video_pad|>?"}]}]
        return client.chat.completions.create(
            model=model, messages=messages, max_tokens=6, temperature=0, logprobs=True
        )

    answers = [ask(video_url(*levels)) for levels in ((0, 90, 180, 250), (0, 90, 180, 250), (250, 180, 90, 0))]
    tokens = [[token.logprob for token in answer.choices[0].logprobs.content] for answer in answers]
    assert tokens[0] == tokens[1] != tokens[2]
    assert answers[0].usage.prompt_tokens - ask(video_url(0, 90)).usage.prompt_tokens == 6
    small = video_url(1)
    refused = {
        "no URL is fetched here": ["http://127.0.0.1/x.mp4"],
        "no files are read here": ["file:///etc/passwd"],
        "10001 frames, at most 128 are taken": [small + "," * 10_000],
        "5 videos, at most 4 are allowed": [small] * 5,
        "frame 1: the bytes are no image": [small + ",AAAA"],
        "the video is refused: ": ["data:video/mp4;base64,AAAA"],
        "must begin with data:video/": [data_url(1)],
    }
    for text, urls in refused.items():
        with pytest.raises(openai.BadRequestError) as caught:
            ask(*urls)
        assert text in str(caught.value)
        assert "messages" in caught.value.body["param"]
    assert ask(small).choices[0].finish_reason


def check_other_dialects(client: openai.OpenAI, url: str, expected, image: str) -> None:
    """Responses and messages see what a chat sees."""
    text = {"type": "input_text", "text": "What is this?"}
    content = [text, {"type": "input_image", "image_url": image, "detail": "auto"}]
    response = client.responses.create(
        model=expected.model, input=[{"role": "user", "content": content}], max_output_tokens=16, temperature=0,
        store=False,
    )  # fmt: skip
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert response.output_text.startswith(expected.choices[0].message.content[:2])
    source = {"type": "base64", "media_type": "image/png", "data": image.partition(",")[2]}
    blocks = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]
    body = {"model": expected.model, "max_tokens": 6, "temperature": 0}
    fetched = {"type": "url", "url": "https://127.0.0.1/x.png"}
    for content, status in ((blocks, 200), (blocks[1:], 200), ([blocks[0], {**blocks[1], "source": fetched}], 400)):
        answer = httpx.post(url + "/messages", json={**body, "messages": [{"role": "user", "content": content}]})
        assert answer.status_code == status, answer.text
        if content is blocks:
            usage = answer.json()["usage"]
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected.usage.prompt_tokens
            assert answer.json()["content"][0]["text"] == expected.choices[0].message.content
    assert "messages[0].content[1].source: no URL is fetched here" in answer.text
    content = [text, {"type": "input_image", "image_url": "http://127.0.0.1/x.png", "detail": "auto"}]
    answer = httpx.post(url + "/responses", json={"input": [{"role": "user", "content": content}], "instructions": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[1].image_url")
    # nobody looks for an image of which no vector is made
    answer = httpx.post(url + "/embeddings", json={"messages": chat_with("http://127.0.0.1/x.png")})
    words = "messages: vectors are of texts; leave images, videos and prompt_embeds out."
    assert answer.json()["error"]["message"] == words
    # a session keeps tokens alone: it would go on with placeholders of an image that it has not seen
    session = httpx.post(url + "/sessions").json()["id"]
    answer = httpx.post(f"{url}/sessions/{session}/messages", json={"messages": chat_with(image)})
    assert answer.status_code == 400, answer.text
    assert "messages: a turn of a session takes text only" in answer.json()["error"]["message"]


def test_the_official_client(tmp_path):
    checkpoint = make_image_checkpoint(tmp_path / "vision")
    options = ["--port", "0", "--dtype", "float32", "--max-model-len", "128"]
    with ServerProcess(["-m", "quire.interfaces.cli", "serve", str(checkpoint), *options]) as server:
        url = server.wait_ready(300) + "/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            model = client.models.list().data[0].id

            def ask(image: str):
                return client.chat.completions.create(
                    model=model, messages=chat_with(image), max_tokens=6, temperature=0, logprobs=True
                )

            answers = [ask(data_url(seed)) for seed in (1, 1, 2)]
            tokens = [[token.token for token in answer.choices[0].logprobs.content] for answer in answers]
            assert tokens[0] == tokens[1] != tokens[2]
            assert {answer.usage.prompt_tokens for answer in answers} == {answers[0].usage.prompt_tokens}
            for bad in ("http://127.0.0.1/x.png", "file:///etc/passwd", "data:image/png;base64,AAAA"):
                with pytest.raises(openai.BadRequestError) as caught:
                    ask(bad)
                assert "messages[0].content[1].image_url: " in str(caught.value)
            assert ask(data_url(1)).choices[0].finish_reason
            check_videos(client, model)
            check_other_dialects(client, url, ask(data_url(1)), data_url(1))
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output
