"""Images as clients send them: what is read is what Transformers' own processor reads, what is hostile is refused."""

from __future__ import annotations

import base64
import io
import json
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.errors import ModelError, RequestError
from quire.messages import ImageItem
from quire.renderer.images import MOST_BYTES, MOST_PIXELS, ImageProcessor, ImageRenderer, ImageSource

PLACEHOLDER = 7
CONFIG = {"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 4096, "resample": 3}


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = tmp_path_factory.mktemp("processor")
    (folder / "preprocessor_config.json").write_text(json.dumps(CONFIG))
    return ImageProcessor.read(folder)


def read(processor: ImageProcessor, content: Any, most_tokens: int | None = None) -> ImageItem:
    return processor.item(ImageSource(content, "messages[0].content[1].image_url"), 0, most_tokens)


@pytest.mark.parametrize("size", [(40, 24), (33, 90), (64, 64), (200, 100), (1, 1), (3, 120), (7, 9)])
def test_pixels_are_those_of_transformers(size: tuple[int, int], processor: ImageProcessor) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil(**CONFIG)(images=[picture(*size)], return_tensors="np")
    ours = read(processor, data_url(saved(picture(*size))))
    assert (2 * ours.num_rows, 2 * ours.num_columns) == tuple(theirs["image_grid_thw"][0][1:])
    pixels = np.frombuffer(ours.pixels, dtype=np.uint8).reshape(ours.shape).astype(np.float32)
    pixels = (pixels * ours.scale - np.float32(ours.mean)) / np.float32(ours.std)
    # of the first square, the first patch: colours, two equal frames, then its pixels
    patch = theirs["pixel_values"][0].reshape(3, 2, 4, 4)
    np.testing.assert_allclose(patch[:, 0], pixels[:4, :4].transpose(2, 0, 1), atol=1e-6)
    assert pixels.sum() * 2 == pytest.approx(theirs["pixel_values"].sum(), rel=1e-3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(kind: str, processor: ImageProcessor) -> None:
    assert read(processor, saved(picture(40, 24), kind)).shape == (24, 40, 3)


@pytest.mark.parametrize("mode", ["L", "P", "LA", "RGBA", "1", "I;16"])
def test_modes(mode: str, processor: ImageProcessor) -> None:
    image = Image.new("I;16", (40, 24), 65_535 // 2) if mode == "I;16" else picture(40, 24, mode=mode)
    item = read(processor, saved(image))
    assert len(item.pixels) == 24 * 40 * 3
    if mode == "I;16":
        assert set(item.pixels) == {127}


def test_cmyk(processor: ImageProcessor) -> None:
    assert read(processor, saved(picture(40, 24, mode="CMYK"), "JPEG")).shape == (24, 40, 3)


def test_the_model_sees_what_a_person_sees(processor: ImageProcessor) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = read(processor, saved(picture(40, 24), "PNG", exif=exif))
    upright = read(processor, saved(picture(40, 24).transpose(Image.Transpose.ROTATE_270)))
    assert turned.pixels == upright.pixels
    clear = Image.new("RGBA", (40, 24), (255, 0, 0, 0))
    assert set(read(processor, saved(clear)).pixels) == {255}
    keyed = saved(Image.new("RGB", (40, 24), (255, 0, 0)), transparency=(255, 0, 0))
    assert set(read(processor, keyed).pixels) == {255}


def test_the_first_frame_counts(processor: ImageProcessor) -> None:
    frames = [picture(40, 24, seed) for seed in range(3)]
    animated = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert read(processor, animated).pixels == read(processor, saved(frames[0], "GIF")).pixels


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, content: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


HOSTILE: dict[str, tuple[Any, str]] = {
    "bomb": (png(50_000, 50_000), "cannot be read|pixels, at most"),
    "large": (png(5_000, 5_000), "25000000|5000 x 5000 pixels, at most"),
    "no pixels": (png(0, 0), "cannot be read|0 x 0 pixels"),
    "header alone": (png(40, 24), "damaged or ends too early"),
    "truncated": (saved(picture(40, 24), "JPEG")[:300], "damaged or ends too early|cannot be read"),
    "long strip": (saved(picture(2, 900)), "one side may be 200 times"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read as an image"),
    "nothing": (b"", "cannot be read as an image"),
    "bmp": (saved(picture(40, 24), "BMP"), "PNG, JPEG, WebP and GIF"),
    "tiff": (saved(picture(40, 24), "TIFF"), "PNG, JPEG, WebP and GIF"),
    "jpeg 2000": (b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(100), "PNG, JPEG, WebP and GIF"),
    "too many bytes": (bytes(MOST_BYTES + 1), "at most 20971520 are allowed"),
    "too many characters": ("data:image/png;base64," + "A" * (MOST_BYTES * 2), "at most 20971520 are allowed"),
    "no base64": ("data:image/png;base64,???", "no valid base64"),
    "no comma": ("data:image/png;base64", "must look like"),
    "not encoded": ("data:image/png,abc", "must look like"),
    "network": ("http://127.0.0.1:1/a.png", "not fetched"),
    "network, disguised": ("HTTPS://ok@169.254.169.254/a.png", "not fetched"),
    "file": ("file:///etc/passwd", "not fetched"),
    "number": (5, "a int is no image"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_refused_in_one_line(name: str, processor: ImageProcessor) -> None:
    content, text = HOSTILE[name]
    tracemalloc.start()
    with pytest.raises(RequestError, match=text) as caught:
        read(processor, content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 2**20
    assert "\n" not in str(caught.value)
    assert caught.value.param == "messages[0].content[1].image_url"
    assert "0x" not in str(caught.value), "an address"


def test_the_bound_itself_is_allowed(processor: ImageProcessor) -> None:
    assert read(processor, saved(Image.new("L", (4096, MOST_PIXELS // 4096)))).num_rows == 8


def test_an_image_without_room_is_refused_before_it_is_decoded(processor: ImageProcessor) -> None:
    with pytest.raises(RequestError, match="takes 15 tokens, 14 are left"):
        # its pixels are not there: whoever decoded it would fail with other words
        read(processor, png(40, 24), most_tokens=14)


def test_a_hash_names_what_the_model_sees(processor: ImageProcessor) -> None:
    flat = bytes(range(256)) * 9
    wide = Image.frombytes("RGB", (32, 24), flat)
    high = Image.frombytes("RGB", (24, 32), flat)
    assert read(processor, saved(wide)).pixels == read(processor, saved(high)).pixels
    hashes = [read(processor, saved(image)).content_hash for image in (wide, high, picture(32, 24))]
    assert len(set(hashes)) == 3
    assert read(processor, saved(wide, "WEBP", lossless=True)).content_hash == hashes[0]


def test_placeholders_and_images_must_agree(processor: ImageProcessor) -> None:
    renderer = ImageRenderer(processor, PLACEHOLDER, 2)
    source = ImageSource(picture(40, 24), "image")
    tokens, (first, second) = renderer.place([1, PLACEHOLDER, 2, PLACEHOLDER], [source, source], None)
    assert tokens == [1, *[PLACEHOLDER] * 15, 2, *[PLACEHOLDER] * 15]
    assert (first.position, first.end, second.position, second.end) == (1, 16, 17, 32)
    for number, given in ((1, []), (0, [source]), (3, [source, source])):
        with pytest.raises(RequestError, match=f"{len(given)} given, and the prompt has {number} placeholders"):
            renderer.place([PLACEHOLDER] * number, given, None)
    with pytest.raises(RequestError, match=r"3 given, a request may have 2 \(limit_mm_per_prompt\)"):
        renderer.place([PLACEHOLDER] * 3, [source] * 3, None)


def test_a_file_that_says_nothing_usable(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not there"):
        ImageProcessor.read(tmp_path)
    for values in ({"patch_size": 0}, {"image_mean": [1]}, {"do_resize": False}, {"min_pixels": "many"}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
        with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
            ImageProcessor.read(tmp_path)
