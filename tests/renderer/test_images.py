"""Images of strangers: decoded within bounds, or refused in one line; patches and placeholders."""

import base64
import io
import json
import re
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from quire.errors import ModelError, RequestError
from quire.renderer.decoding_process import Asked
from quire.renderer.image_decoder import ImageDecoder
from quire.renderer.image_parts import Sources
from quire.renderer.image_processor import ImageProcessor
from quire.renderer.images import MOST_BYTES, MOST_PIXELS, View
from quire.worker.image_rows import pixels_of

PROCESSOR = ImageProcessor(image_token_id=5)


def image_of(source: object, where: str) -> Image.Image:
    """Decoded, and not resized."""
    return Image.fromarray(PROCESSOR.decoder.open(source, where).pixels(lambda width, height: (width, height), 3))


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def huge_png(width: int, height: int) -> bytes:
    """A header that promises pixels which never come."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 1000)
    chunks = b"".join(struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (head, data))
    return b"\x89PNG\r\n\x1a\n" + chunks


BAD = {
    "file": "file:///etc/passwd",
    "http": "http://127.0.0.1/a.png",
    "metadata": "http://169.254.169.254/latest",
    "no base64": "data:image/png;base64,!!!!",
    "a lone surrogate": "data:image/png;base64,\ud800AAA",
    "no comma": "data:image/png;base64",
    "video": "data:video/jpeg;base64,AAAA,BBBB",
    "text": url(b"hello"),
    "nothing": url(b""),
    "truncated png": url(encoded(noise(50, 50), "png")[:600]),
    "truncated jpeg": url(encoded(noise(50, 50), "jpeg")[:300], "jpeg"),
    "tiff": url(encoded(noise(9, 9), "tiff"), "tiff"),
    "bmp": url(encoded(noise(9, 9), "bmp"), "png"),
    "jpeg2000": url(b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(100), "jp2"),
    "50k x 50k": url(huge_png(50_000, 50_000)),
    "above Pillow's own bound": url(huge_png(1 << 30, 1 << 30)),
    "just too many pixels": url(huge_png(4096, MOST_PIXELS // 4096 + 1)),
    "0 x 0": url(huge_png(0, 0)),
    "many bytes": "data:image/png;base64," + "A" * (MOST_BYTES // 3 * 4 + 100),
    "a number": 7,
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_in_one_line(name: str):
    """With little memory here, whatever its process needs."""
    tracemalloc.start()
    with pytest.raises(RequestError) as caught:
        image_of(BAD[name], "messages[0].content[0].image_url")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    text = str(caught.value)
    assert text.startswith("messages[0].content[0].image_url: ")
    assert "\n" not in text
    assert len(text) < 300
    assert "0x" not in text, "an address of this process"
    assert peak < 64 << 20


@pytest.mark.parametrize("kind", ["png", "webp", "gif", "jpeg"])
def test_formats(kind: str):
    image = image_of(url(encoded(noise(30, 40), kind), kind), "x")
    assert (image.mode, image.size) == ("RGB", (40, 30))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_modes(mode: str):
    image = Image.new(mode, (8, 6)) if mode == "I;16" else noise(6, 8).convert(mode)
    assert image_of(encoded(image, "png"), "x").mode == "RGB"


def test_only_the_first_frame_of_many():
    frames = [Image.new("RGB", (8, 8), (10 * number, 0, 0)) for number in range(20)]
    content = encoded(frames[3], "gif", save_all=True, append_images=frames)
    assert abs(image_of(content, "x").getpixel((0, 0))[0] - 30) < 3


def test_the_right_way_up_and_on_white():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert image_of(encoded(noise(30, 40), "jpeg", exif=exif), "x").size == (30, 40)
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert image_of(encoded(clear, "png"), "x").getpixel((1, 1)) == (255, 255, 255)


@pytest.mark.parametrize("size", [(40, 50), (300, 111), (1000, 1700), (1, 1)])
def test_patches_equal_those_of_transformers(size: tuple[int, int]):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = noise(*size)
    _, (media,) = PROCESSOR.expand([5], [(image, "x")], None)
    theirs = Qwen2VLImageProcessorPil()(image, return_tensors="np")
    assert [media.grid] == theirs["image_grid_thw"].tolist()
    ours = pixels_of(media, torch.device("cpu")).numpy()
    np.testing.assert_allclose(ours, theirs["pixel_values"], atol=2e-6)
    assert len(media.pixels) * 8 == theirs["pixel_values"].nbytes


def test_placeholders():
    token_ids, media = PROCESSOR.expand([1, 5, 2, 5], [(noise(56, 56), "a"), (noise(56, 112), "b")], 100)
    assert token_ids == [1, *[5] * 4, 2, *[5] * 8]
    assert [(image.start, image.length) for image in media] == [(1, 4), (6, 8)]


def test_the_hash_tells_shapes_apart():
    flat = Image.new("RGB", (56, 112)), Image.new("RGB", (112, 56))
    hashes = [PROCESSOR.expand([5], [(image, "x")], None)[1][0] for image in flat]
    assert hashes[0].pixels == hashes[1].pixels
    assert hashes[0].content_hash != hashes[1].content_hash


@pytest.mark.parametrize(
    ("token_ids", "num_images", "room", "text"),
    [
        ([1], 1, 100, "1 images for 0 placeholders"),
        ([5, 5], 1, 100, "1 images for 2 placeholders"),
        ([5] * 9, 9, 1000, "at most 8"),
        ([5], 1, 3, "has room for 3 more"),
    ],
)
def test_what_does_not_fit(token_ids: list[int], num_images: int, room: int, text: str):
    with pytest.raises(RequestError, match=text):
        PROCESSOR.open(Sources(images=[(noise(56, 56), "x")] * num_images)).expand(token_ids, room)


def test_the_worker_makes_the_numbers_of_float_arithmetic():
    """Levels cross to it as bytes; what it makes of them has the bits of the usual order of operations."""
    _, (media,) = PROCESSOR.expand([5], [(noise(60, 90), "x")], None)
    levels = np.frombuffer(media.pixels, np.uint8).reshape(media.shape).astype(np.float32)
    mean, std = (np.asarray(each, np.float32)[:, None] for each in (PROCESSOR.mean, PROCESSOR.std))
    frame = (levels * np.float32(1 / 255) - mean) / std
    expected = np.repeat(frame[:, :, None], 2, axis=2).reshape(len(levels), -1)
    assert (pixels_of(media, torch.device("cpu")).numpy() == expected).all()


def test_what_is_too_large_for_the_context_is_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch):
    """Also where it is the second image: its pixels never come, and nobody has asked for those of the first."""
    monkeypatch.setattr("quire.renderer.image_decoder._Loaded.pixels", lambda *_: pytest.fail("decoded"))
    sources = [(noise(56, 56), "a"), (huge_png(2000, 2000), "messages[2].content[1].image_url")]
    with pytest.raises(RequestError, match=re.escape("messages[2].content[1].image_url: the image becomes")) as caught:
        PROCESSOR.expand([5, 5], sources, 20)
    assert caught.value.code == "context_length_exceeded"


def test_the_same_image_twice_is_decoded_once(monkeypatch: pytest.MonkeyPatch):
    decoded: list[str] = []
    ask = ImageDecoder.ask

    def asked(decoder: ImageDecoder, what: Asked, content: bytes, where: str) -> object:
        decoded.extend([where] if what.views else [])
        return ask(decoder, what, content, where)

    monkeypatch.setattr(ImageDecoder, "ask", asked)
    first, other = encoded(noise(56, 56), "png"), encoded(noise(56, 56, 1), "png")
    tokens, media = PROCESSOR.expand([5, 5, 5], [(first, "a"), (other, "b"), (bytes(bytearray(first)), "c")], None)
    assert decoded == ["a", "b"]
    assert (len(tokens), [image.start for image in media]) == (12, [0, 4, 8])
    assert media[0].content_hash == media[2].content_hash != media[1].content_hash


def test_a_line_is_no_image():
    with pytest.raises(RequestError, match="factor of 200"):
        PROCESSOR.expand([5], [(noise(1, 300), "x")], None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"patch_size": 0}, "patch_size=0: must be from 1"),
        ({"patch_size": -14}, "patch_size=-14"),
        ({"merge_size": 0}, "merge_size=0"),
        ({"temporal_patch_size": 1 << 40}, "temporal_patch_size=1099511627776: must be from 1 to 1024"),
        ({"patch_size": float("inf")}, "cannot convert float infinity"),
        ({"max_pixels": -1}, "max_pixels=-1"),
        ({"min_pixels": 1 << 70, "max_pixels": 1 << 71}, "must be from 1 to 1073741824"),
        ({"min_pixels": 4000, "max_pixels": 3000}, "the second the greater one"),
        ({"min_pixels": 1, "max_pixels": 783}, "not below the 784 pixels of a token"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std=.* must be 3 numbers"),
        ({"image_mean": [0.5]}, "image_mean=.* must be 3 numbers"),
        ({"image_mean": ["a", "b", "c"]}, "could not convert"),
        ({"image_mean": [10**400, 1, 1]}, "int too large"),
        ({"size": 5}, "has no attribute"),
        ([], "no object"),
    ],
)
def test_a_processor_whose_numbers_cannot_be(given: object, words: str, tmp_path: Path):
    """Each would be an error of every image, or of a step."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    with pytest.raises(ModelError, match=words) as caught:
        ImageProcessor.find(tmp_path, {"model_type": "qwen2_5_vl", "image_token_id": 5})
    assert str(caught.value).startswith(str(tmp_path / "preprocessor_config.json"))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_nested_too_deep(tmp_path: Path):
    (tmp_path / "preprocessor_config.json").write_text("[" * 200_000)
    with pytest.raises(ModelError, match="no image processor's configuration"):
        ImageProcessor.find(tmp_path, {"model_type": "qwen2_5_vl", "image_token_id": 5})


def test_numbers_among_those_of_all_processors(tmp_path: Path):
    """As Transformers writes them since its fifth version; they count before those of a file of their own."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 7}))
    whole = tmp_path / "processor_config.json"
    hf_config = {"model_type": "qwen2_5_vl", "image_token_id": 5}
    whole.write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    assert ImageProcessor.find(tmp_path, hf_config).patch_size == 7
    whole.write_text(json.dumps({"image_processor": {"patch_size": 16, "image_mean": [0.5] * 3}}))
    processor = ImageProcessor.find(tmp_path, hf_config)
    assert (processor.patch_size, processor.mean) == (16, (0.5, 0.5, 0.5))
    for given, words in (([], "no object"), (5, "no object"), ({"patch_size": 0}, "patch_size=0")):
        whole.write_text(json.dumps({"image_processor": given}))
        with pytest.raises(ModelError, match=words) as caught:
            ImageProcessor.find(tmp_path, hf_config)
        assert str(caught.value).startswith(str(whole))


def test_no_image_has_more_tokens_than_a_step_encodes(tmp_path: Path):
    """The model sees what its own processor makes of it with that many pixels."""
    hf_config = {"model_type": "qwen2_5_vl", "image_token_id": 5}
    sizes = {"min_pixels": 3136, "max_pixels": 12845056}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(sizes))
    large, small = noise(900, 1400), noise(60, 120)
    whole = ImageProcessor.find(tmp_path, hf_config)
    bounded = ImageProcessor.find(tmp_path, hf_config, max_image_tokens=100)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**sizes, "max_pixels": 100 * 28 * 28}))
    asked_for = ImageProcessor.find(tmp_path, hf_config)
    least = ImageProcessor.find(tmp_path, hf_config, max_image_tokens=1)

    def media(processor, image):
        return processor.expand([5], [(image, "image")], None)[1][0]

    assert media(whole, large).length == 1600
    assert 90 < media(bounded, large).length <= 100
    assert media(bounded, large) == media(asked_for, large)
    assert media(bounded, small) == media(whole, small)
    assert media(least, large).length <= 4, "none is smaller than min_pixels"


@pytest.mark.parametrize("kind", ["jpeg", "webp", "png", "png that says so behind its pixels"])
def test_the_size_of_an_image_is_known_upright_before_it_is_decoded(kind: str):
    """If its header says so. Where it does not, views are asked for as it turns out to stand."""
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(noise(20, 30), kind[:4].strip(), exif=exif)
    is_late = kind.endswith("pixels")
    if is_late:
        chunk = content[content.index(b"eXIf") - 4 :]
        chunk = chunk[: 12 + int.from_bytes(chunk[:4])]
        content = content.replace(chunk, b"").replace(b"\0\0\0\0IEND", chunk + b"\0\0\0\0IEND")
    for source in (content, Image.open(io.BytesIO(content))):
        opened = PROCESSOR.decoder.open(source, "x")
        assert opened.size == ((30, 20) if is_late else (20, 30))
        [pixels] = opened.views(lambda width, height: [View((2 * width, height))], 3)
        assert pixels.shape == (30, 40, 3)


@pytest.mark.parametrize("is_encoded", [True, False])
def test_several_views_of_an_image(is_encoded: bool):
    """Those of one that lies on its side are asked for as it stands."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = noise(20, 30)
    turned = image.transpose(Image.Transpose.ROTATE_270)
    content = encoded(image, "png", exif=exif)
    source = content if is_encoded else Image.open(io.BytesIO(content))
    opened = PROCESSOR.decoder.open(source, "x")
    seen = opened.views(
        lambda width, height: [View((width, height), (5, 7, 15, 17)), View((8, 9)), View((6, 6), (-2, 1, 8, 7))], 3
    )
    assert [pixels.shape for pixels in seen] == [(10, 10, 3), (9, 8, 3), (6, 10, 3)]
    whole = np.asarray(turned)
    assert whole.shape == (30, 20, 3)
    assert np.array_equal(seen[0], whole[7:17, 5:15])
    assert np.array_equal(seen[1], np.asarray(turned.resize((8, 9), Image.Resampling.BICUBIC)))
    small = np.asarray(turned.resize((6, 6), Image.Resampling.BICUBIC))
    assert np.array_equal(seen[2][:5, 2:8], small[1:])
    beyond = [seen[2][:, :2], seen[2][:, 8:], seen[2][5]]
    assert not any(black.any() for black in beyond)
