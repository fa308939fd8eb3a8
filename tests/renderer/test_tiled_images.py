"""Images of InternVL: the tiles and the tokens that Transformers' processor makes of them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.image_processors import noise, processor_of

from quire.config import EngineOptions, resolve
from quire.errors import ModelError, RequestError
from quire.renderer import Renderer
from quire.renderer.image_processor import ImageProcessor
from quire.renderer.tokenizer import Tokenizer
from quire.testing.image_checkpoints import IMAGE_TOKEN_ID, MARKS, TILES, make_image_checkpoint, reference_inputs

MARK = MARKS[0]
PER_TILE = 4
SIDE = 28
CONFIG: dict[str, Any] = {
    "model_type": "internvl",
    "image_token_id": IMAGE_TOKEN_ID,
    "text_config": {"model_type": "qwen2"},
    "vision_config": {"image_size": SIDE, "patch_size": [7, 7]},
}
NUMBERS = {"size": {"height": SIDE, "width": SIDE}}


def found(folder: Path, numbers: Any = NUMBERS, **more: Any) -> ImageProcessor:
    return processor_of(folder, numbers, {**CONFIG, **more})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("images") / "internvl", "internvl")


@pytest.fixture(scope="module")
def renderer(path: Path) -> Renderer:
    config, _ = resolve(EngineOptions(model=str(path), max_model_len=256))
    return Renderer.from_config(config)


def processed(path: Path, text: str, images: list[Image.Image], monkeypatch: pytest.MonkeyPatch, **numbers: Any) -> Any:
    """By Transformers."""
    from transformers import AutoTokenizer
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    tokenizer = AutoTokenizer.from_pretrained(path)
    for name, token in (("start_image", TILES[0]), ("end_image", TILES[1]), ("context_image", MARK)):
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.video_token = "<video>"
    pixels = GotOcr2ImageProcessorPil(**numbers)
    # its own processor of videos needs torchvision
    monkeypatch.setattr(InternVLProcessor, "check_argument_for_proper_class", lambda *_: None)
    processor = InternVLProcessor(pixels, tokenizer, image_seq_length=PER_TILE)
    return processor(images=images, text=text, return_tensors="pt", add_special_tokens=True)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (f"a {MARK} b", [(60, 120)]),
        (f"{MARK}", [(28, 28)]),
        (f"x\n{MARK}{MARK}\ny", [(300, 111), (9, 8)]),
        (f"{MARK} {MARK}", [(1, 500), (90, 60)]),
    ],
)
def test_tokens_and_pixels_are_those_of_transformers(
    text: str, sizes: list[tuple[int, int]], path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [noise(*size, seed) for seed, size in enumerate(sizes)]
    rendered = renderer.render_prompt(text, images=images)
    numbers = json.loads((path / "preprocessor_config.json").read_text())
    theirs = processed(path, text, images, monkeypatch, size=numbers["size"], max_patches=numbers["max_patches"])
    assert rendered.token_ids == theirs["input_ids"][0].tolist()
    ours = reference_inputs("internvl", rendered.media, torch.tensor([rendered.token_ids]))
    torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"].float(), atol=2e-6, rtol=0)
    assert [medium.length for medium in rendered.media] == [PER_TILE] * len(theirs["pixel_values"])


@pytest.mark.parametrize(("fewest", "most"), [(1, 12), (1, 1), (3, 7), (5, 5), (1, 40)])
def test_tiles_are_as_many_as_with_transformers(fewest: int, most: int, tmp_path: Path) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    numbers = {**NUMBERS, "min_patches": fewest, "max_patches": most}
    processor = found(tmp_path, numbers)
    theirs = GotOcr2ImageProcessorPil(**numbers, crop_to_patches=True)
    generator = np.random.default_rng(1)
    sizes = [(28, 28), (40, 40), (39, 39), (56, 28), (4000, 3000), (3000, 4000), (1920, 1080), (1, 900)]
    sizes += [(int(width), int(height)) for width, height in generator.integers(1, 600, (60, 2))]
    for width, height in sizes:
        opened = processor.decoder.open(Image.new("L", (width, height)), "x")
        expected = theirs.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        assert processor._lengths(opened, "x") == [PER_TILE] * expected, (width, height)


def test_an_image_that_lies_on_its_side(tmp_path: Path) -> None:
    """Its tiles are those of what is seen. Where that is known too late there are as many as were counted."""
    processor = found(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    image = noise(40, 100)
    upright = image.transpose(Image.Transpose.ROTATE_270)
    content = io.BytesIO()
    image.save(content, "png", exif=exif)
    stored = content.getvalue()
    chunk = stored[stored.index(b"eXIf") - 4 :]
    chunk = chunk[: 12 + int.from_bytes(chunk[:4])]
    late = stored.replace(chunk, b"").replace(b"\0\0\0\0IEND", chunk + b"\0\0\0\0IEND")
    expected = processor.expand([IMAGE_TOKEN_ID], [(upright, "x")], None)
    assert processor.expand([IMAGE_TOKEN_ID], [(stored, "x")], None) == expected
    tokens, media = processor.expand([IMAGE_TOKEN_ID], [(late, "x")], None)
    assert len(tokens) == sum(medium.length for medium in media)
    # the square of the whole is the same in any case
    assert media[-1].pixels == expected[1][-1].pixels
    processor.decoder.close()


def test_tiles_that_are_alike_have_one_name(renderer: Renderer) -> None:
    """What was encoded of one is what stands for the other, and of a plain image all tiles are."""
    rendered = renderer.render_prompt(MARK, images=[Image.new("RGB", (120, 60), "red")])
    assert len(rendered.media) == 3
    assert len({medium.content_hash for medium in rendered.media}) == 1


def test_marks_of_a_chat_and_of_tokens(renderer: Renderer) -> None:
    tokens = renderer.render_tokens([5, IMAGE_TOKEN_ID, 6], [noise(28, 28)], None).token_ids
    assert tokens[2:-2] == [IMAGE_TOKEN_ID] * PER_TILE
    chat = [{"role": "user", "content": [{"type": "image", "image": noise(56, 28)}, {"type": "text", "text": MARK}]}]
    assert renderer.render_prompt(chat).token_ids.count(IMAGE_TOKEN_ID) == 3 * PER_TILE
    with pytest.raises(RequestError, match="becomes 12 tokens, and the model's context has room for 8 more"):
        renderer.render_tokens([5, IMAGE_TOKEN_ID], [noise(56, 28)], 10)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"max_patches": 0}, "min_patches=1, max_patches=0: must be from 1 to 256"),
        ({"max_patches": 300}, "max_patches=300"),
        ({"min_patches": 9, "max_patches": 8}, "the second the greater one"),
        ({"size": {"height": 28, "width": 56}}, "size=.*: must be the side of a square"),
        ({"size": {"height": 56, "width": 56}}, "must be vision_config.image_size=28"),
        ({"size": {"shortest_edge": 28}}, "height"),
        ({"do_rescale": False}, "do_rescale=false: must be true"),
        ({"image_std": [0, 1, 1]}, "image_std"),
    ],
)
def test_numbers_that_cannot_be(numbers: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        found(tmp_path, {**NUMBERS, **numbers})
    assert str(caught.value).startswith(str(tmp_path / "preprocessor_config.json"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"downsample_ratio": 0.3}, "downsample_ratio=0.3: must be 1 divided by a whole number"),
        ({"downsample_ratio": 0}, "downsample_ratio=0"),
        ({"vision_config": {"image_size": [28, 56]}}, "image_size=.28, 56.: must be the side of a square"),
        ({"vision_config": {"image_size": 28, "patch_size": 8}}, "must be a multiple of patch_size=8 times 2"),
    ],
)
def test_a_config_that_cannot_be(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        found(tmp_path, **values)


def test_a_tokenizer_without_the_marks(path: Path, tmp_path: Path) -> None:
    from quire.testing.tiny_checkpoints import write_tokenizer

    write_tokenizer(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(NUMBERS))
    with pytest.raises(ModelError, match="has no <img> or no </img>"):
        ImageProcessor.find(tmp_path, CONFIG, tokenizer=Tokenizer.from_folder(tmp_path))
