"""Images that were made to hurt (SEC-10), alone and many at once: each is refused in one line, or is an image; memory
stays within bounds, and nobody beside them notices. What names an image tells images apart (SEC-27)."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from tests.support.image_bombs import BOMBS, LARGE, ODD, bomb, data_url, encoded, noise, png, process_of, spoilt
from tests.support.server_process import ServerProcess

from quire.errors import RequestError
from quire.messages import Media
from quire.renderer.image_decoder import ImageDecoder
from quire.renderer.image_processor import ImageProcessor
from quire.testing.image_checkpoints import make_image_checkpoint

PLACE = "messages[2].content[1].image_url"
_MOST_MEMORY = 256 << 20
# what the bodies of all requests that wait for their turn may take beside it
_BODIES = 96 << 20
# one for each way in which memory or time could go, and some that are none of the largest
MASS = [
    "50k x 50k", "texts that become 450 MB", "a profile that becomes 500 MB", "a large header and nothing behind it",
    "the largest with transparency", "the largest jpeg for printers", "the largest webp that moves", "tiff", "noise",
    "a gif of many frames", "png without its end", "a line",
]  # fmt: skip


@pytest.fixture(scope="module")
def processor() -> Iterator[ImageProcessor]:
    processor = ImageProcessor(image_token_id=5)
    yield processor
    processor.decoder.close()


def media_of(processor: ImageProcessor, source: object) -> Media:
    return processor.expand([5], [(source, PLACE)], None)[1][0]


def refusal(processor: ImageProcessor, content: bytes) -> str | None:
    try:
        media_of(processor, content)
    except RequestError as error:
        return str(error)
    return None


def peak_of(processor: ImageProcessor) -> int:
    """The most memory that the decoding process has had since it was looked at last."""
    process = process_of(processor.decoder)
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize("name", [*BOMBS, *ODD, *(pytest.param(name, marks=pytest.mark.nightly) for name in LARGE)])
def test_one_alone(name: str, processor: ImageProcessor) -> None:
    media_of(processor, encoded(noise(30, 30), "png"))
    before = peak_of(processor)
    text = refusal(processor, bomb(name))
    assert (text is not None) == (name in BOMBS), text
    if text is not None:
        assert text.startswith(PLACE + ": ")
        assert "\n" not in text
        assert "0x" not in text, "an address of a process"
        assert len(text) < 300
    assert peak_of(processor) - before < _MOST_MEMORY


@pytest.mark.parametrize("kind", ["cut", "lined", "tiled", "scaled"])
@pytest.mark.parametrize("name", ["a line", "the largest jpeg for printers", "as thin as may be"])
def test_one_that_other_families_take(name: str, kind: str, tmp_path: Path) -> None:
    """What an image becomes before it is cut is bounded too. A line is none where its size follows from the bounds."""
    model_type, numbers, vision = {
        "cut": ("llava", {"size": {"shortest_edge": 336}, "crop_size": 336}, {"image_size": 336, "patch_size": 14}),
        "lined": ("mistral3", {"size": {"longest_edge": 1540}}, {"model_type": "pixtral", "patch_size": 14}),
        "tiled": ("internvl", {"size": {"height": 448, "width": 448}, "max_patches": 12}, {}),
        "scaled": ("gemma4", {"max_soft_tokens": 1120}, {}),
    }[kind]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(numbers))
    config = {"model_type": model_type, "text_config": {"model_type": "llama"}, "vision_config": vision}
    processor = ImageProcessor.find(tmp_path, {**config, "image_token_index": 5, "image_token_id": 5})
    assert processor is not None
    media_of(processor, encoded(noise(30, 30), "png"))
    before = peak_of(processor)
    text = refusal(processor, png(16_000, 110) if name == "as thin as may be" else bomb(name))
    assert (text is not None) == (name == "a line" and kind in ("cut", "lined")), text
    if text is not None:
        assert text.startswith(PLACE + ": the image is 16000 x 2 pixels; its sides may differ by a factor of ")
    assert peak_of(processor) - before < _MOST_MEMORY
    processor.decoder.close()


def test_bytes_that_were_spoilt(processor: ImageProcessor) -> None:
    """Each is an image, or none; its process outlives them."""
    media_of(processor, encoded(noise(30, 30), "png"))
    process = process_of(processor.decoder)
    refusals = [text for seed in range(300) if (text := refusal(processor, spoilt(seed))) is not None]
    assert max(map(len, refusals)) < 300
    assert 50 < len(refusals) < 295
    assert process_of(processor.decoder) is process


def test_a_decoder_that_dies_or_stands_still_ends_one_request() -> None:
    decoder = ImageDecoder(seconds=0.5)
    good = encoded(noise(30, 30), "png")
    decoder.open(good, PLACE)
    first = process_of(decoder)
    os.kill(first.pid, signal.SIGSTOP)
    with pytest.raises(RequestError, match=r"takes more than 0\.5 s to decode"):
        decoder.open(good, PLACE)
    assert first.poll() == -signal.SIGKILL
    decoder._seconds = 60
    decoder.open(good, PLACE)
    second = process_of(decoder)
    os.kill(second.pid, signal.SIGSTOP)
    threading.Timer(0.2, second.kill).start()
    with pytest.raises(RequestError, match="crashes its decoder"):
        decoder.open(good, PLACE)
    assert decoder.open(good, PLACE).size == (30, 30)
    decoder.close()
    assert process_of(decoder).poll() is not None


def test_nothing_of_a_stranger_is_decoded_here(processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder holds the interpreter, and with it the event loop, for as long as it likes."""
    good = encoded(noise(30, 30), "png")
    media_of(processor, good)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(Image.Image, "resize", lambda *_: pytest.fail("resized"))
    assert media_of(processor, data_url(good)).length == 4


# ---------------------------------------------------------------------------------------------- odd ones are right


def colour(processor: ImageProcessor, content: bytes) -> list[int]:
    pixels = processor.decoder.open(content, PLACE).pixels(lambda width, height: (width, height), 3)
    return pixels.reshape(-1, 3).mean(axis=0).round().astype(int).tolist()


def test_colours(processor: ImageProcessor) -> None:
    grey16 = Image.fromarray(np.full((9, 9), 40_000, np.uint16))
    assert colour(processor, encoded(grey16, "png")) == [156] * 3
    palette = Image.new("P", (9, 9), 7)
    palette.putpalette([9, 50, 200] * 256)
    for kind in ("png", "gif"):
        assert colour(processor, encoded(palette, kind)) == [9, 50, 200]
    printed = Image.new("CMYK", (16, 16), (0, 200, 100, 30))
    wanted = printed.convert("RGB").getpixel((0, 0))
    assert colour(processor, encoded(printed, "jpeg", quality=100)) == pytest.approx(wanted, abs=2)
    half = Image.new("RGBA", (9, 9), (0, 0, 0, 128))
    assert colour(processor, encoded(half, "png")) == [127] * 3
    first = [Image.new("RGB", (9, 9), name) for name in ("red", "blue")]
    assert colour(processor, encoded(first[0], "png", save_all=True, append_images=first[1:])) == [255, 0, 0]
    assert colour(processor, encoded(first[0], "gif", save_all=True, append_images=first[1:])) == [255, 0, 0]


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_the_right_way_up(kind: str, processor: ImageProcessor) -> None:
    """Red on the left as it is stored; who looks at it sees red above."""
    image = Image.new("RGB", (160, 60), "blue")
    image.paste("red", (0, 0, 80, 60))
    exif = Image.Exif()
    exif[0x0112] = 6
    opened = processor.decoder.open(encoded(image, kind, exif=exif), PLACE)
    pixels = opened.pixels(lambda width, height: (width // 2, height // 2), 3)
    assert pixels.shape == (80, 30, 3)
    assert pixels[5, 15, 0] > 200 > 50 > pixels[75, 15, 0]


# ---------------------------------------------------------------------------------------------- names (SEC-27)


def test_images_of_the_same_bytes_have_other_names(processor: ImageProcessor) -> None:
    """Levels, width, height, numbers of the processor: whatever differs, the name does."""
    others = [
        ImageProcessor(image_token_id=5, **numbers) for numbers in ({"std": (1, 1, 1)}, {"temporal_patch_size": 1})
    ]
    names: dict[bytes, str] = {}
    for (rows, columns), level in itertools.product(((1, 6), (6, 1), (2, 3), (3, 2), (1, 1)), range(40)):
        image = Image.new("RGB", (28 * columns * 2, 28 * rows * 2), (level, level, level))
        for other in (processor, *others):
            media = media_of(other, image)
            what = f"{rows} {columns} {level} {other.std} {other.temporal_patch_size}"
            assert names.setdefault(media.content_hash, what) == what
    assert len(names) == 5 * 40 * 3
    first = noise(56, 56)
    second = first.copy()
    second.putpixel((55, 55), tuple(value ^ 1 for value in first.getpixel((55, 55))))
    assert media_of(processor, first).content_hash != media_of(processor, second).content_hash
    # however it was written down
    assert media_of(processor, first).content_hash == media_of(processor, encoded(first, "png")).content_hash


# ---------------------------------------------------------------------------------------------- a server


def chat(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6, "temperature": 0, **more}


def image_part(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content), "detail": "low"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


# what stands for images, films and sounds among the tokens of many families
TOKENS = (
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<image>", "</image>", "<|image|>", "[IMG]",
    "[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<|audio|>", "<img>",
)  # fmt: skip


async def mass(url: str, pid: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def answer(body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
            return await client.post(path, json=body)

        canary = chat(text_part("What is this?"), image_part(encoded(noise(80, 60), "png")))
        bystander = chat(text_part("hello"), max_tokens=30)
        expected = [(await answer(body)).json()["choices"][0]["message"]["content"] for body in (canary, bystander)]
        process = psutil.Process(pid)
        children = {child.pid for child in process.children(recursive=True)}
        before, is_over = memory_of(process), False
        highest = dict(before)

        async def look() -> None:
            while not is_over:
                for role, num_bytes in memory_of(process).items():
                    highest[role] = max(highest[role], num_bytes)
                await asyncio.sleep(0.02)

        async def keep_asking() -> int:
            for count in itertools.count():
                if is_over:
                    return count
                found = await answer(bystander)
                assert found.json()["choices"][0]["message"]["content"] == expected[1]
            raise AssertionError

        beside = [asyncio.create_task(work()) for work in (look, keep_asking, keep_asking)]
        bodies = [(name, chat(text_part("x"), image_part(bomb(name)), max_tokens=1)) for name in MASS * 3]
        bodies += [("spoilt", chat(image_part(spoilt(seed)), max_tokens=1)) for seed in range(30)]
        for name, found in zip(bodies, await asyncio.gather(*(answer(body) for _, body in bodies)), strict=True):
            check(name[0], found)
        is_over = True
        _, *counts = await asyncio.gather(*beside)
        assert min(counts) > 3, "bystanders were served meanwhile"
        growth = {role: (num_bytes - before[role]) >> 20 for role, num_bytes in highest.items()}
        assert growth["decoder"] < _MOST_MEMORY >> 20, growth
        assert growth["others"] < _BODIES >> 20, growth
        for text in TOKENS:
            for body, path in (
                (
                    chat(text_part(text), image_part(encoded(noise(60, 60), "png")), max_tokens=1),
                    "/v1/chat/completions",
                ),
                (chat(text_part(text * 5), max_tokens=1), "/v1/chat/completions"),
                ({"prompt": text * 3, "max_tokens": 1}, "/v1/completions"),
            ):
                found = await answer(body, path)
                assert found.status_code == 200, (text, found.text)
        found = [await answer(body) for body in (canary, bystander)]
        assert [one.json()["choices"][0]["message"]["content"] for one in found] == expected
        assert {child.pid for child in process.children(recursive=True)} == children, "no process was replaced"
        many = chat(*[image_part(encoded(noise(60, 60), "png"))] * 3)
        assert "messages: 3 images, at most 2 are allowed" in (await answer(many)).json()["error"]["message"]


def memory_of(process: psutil.Process) -> dict[str, int]:
    """Of the process that decodes, and of the server and its engine."""
    found = {"decoder": 0, "others": process.memory_info().rss}
    for child in process.children(recursive=True):
        role = "decoder" if any("decoding_process" in word for word in child.cmdline()) else "others"
        found[role] += child.memory_info().rss
    return found


def check(name: str, found: httpx.Response) -> None:
    assert found.status_code == 400 or (found.status_code == 200 and name not in BOMBS), (name, found.text)
    if found.status_code == 400:
        error = found.json()["error"]
        assert error["message"].startswith("messages[0].content["), error
        assert len(found.content) < 1024
        assert "\n" not in error["message"]


def test_many_at_once_stop_nobody(tmp_path: Path) -> None:
    checkpoint = make_image_checkpoint(tmp_path / "vision")
    options = ["--port", "0", "--dtype", "float32", "--max-model-len", "256", "--limit-mm-per-prompt", '{"image": 2}']
    with ServerProcess(["-m", "quire.interfaces.cli", "serve", str(checkpoint), *options]) as server:
        asyncio.run(mass(server.wait_ready(300), server.pid))
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output
