"""Images of LLaVA, Pixtral and Mistral Small: the pixels and the tokens that Transformers' processors make of them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire.config import EngineOptions, resolve
from quire.config.image_sizes import ImageSizes
from quire.errors import ModelError, RequestError
from quire.messages import Media
from quire.renderer import Renderer
from quire.renderer.image_processor import ImageProcessor
from quire.renderer.tokenizer import Tokenizer
from quire.testing.image_checkpoints import (
    IMAGE_TOKEN_ID,
    JOINED,
    MARKS,
    ROW_ENDS,
    make_image_checkpoint,
    reference_inputs,
)

MARK = MARKS[0]
CLIP = {"image_processor_type": "CLIPImageProcessorFast"}


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


IMAGES = [noise(60, 120), noise(56, 56, 1), noise(301, 111, 2), noise(9, 8, 3), noise(84, 85, 4), noise(70, 13, 5)]


# that of InternVL has a file of its own: test_tiled_images.py
@pytest.fixture(scope="module", params=[name for name in JOINED if not name.startswith("internvl")])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("images") / family, family)


@pytest.fixture(scope="module")
def renderer(path: Path) -> Renderer:
    config, _ = resolve(EngineOptions(model=str(path), max_model_len=256))
    return Renderer.from_config(config)


def processed(family: str, path: Path, given: dict[str, Any], text: str, images: list[Image.Image]) -> Any:
    """By Transformers, one image after the other: it pads those of a batch to one size."""
    from transformers import AutoTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(path)
    numbers = {name: value for name, value in given.items() if name != "image_processor_type"}
    if family == "llava":
        return LlavaProcessor(
            CLIPImageProcessorPil(**numbers), tokenizer, patch_size=14, vision_feature_select_strategy="default",
            image_token=MARK, num_additional_image_tokens=1,
        )(images=images, text=[text], return_tensors="pt")  # fmt: skip
    if family == "llava_next":
        return LlavaNextProcessor(
            LlavaNextImageProcessorPil(**numbers), tokenizer, patch_size=14, vision_feature_select_strategy="default",
            image_token=MARK, num_additional_image_tokens=1,
        )(images=images, text=[text], return_tensors="pt")  # fmt: skip
    if family == "llava_siglip":
        return LlavaProcessor(
            SiglipImageProcessorPil(**numbers), tokenizer, patch_size=14, vision_feature_select_strategy="full",
            image_token=MARK,
        )(images=images, text=[text], return_tensors="pt")  # fmt: skip
    return pixtral_processor(PixtralImageProcessorPil(**numbers), tokenizer, 2 if family == "mistral3" else 1)(
        images, text
    )


def pixtral_processor(pixels: Any, tokenizer: Any, merge_size: int) -> Any:
    """That of Transformers wants another library, which only makes pixels otherwise: its tokens are written here."""

    def run(images: list[Image.Image], text: str) -> Any:
        seen = pixels(images, patch_size=14 * merge_size, return_tensors="pt")
        marks = []
        for height, width in seen["image_sizes"].tolist():
            row = MARK * (width // (14 * merge_size)) + ROW_ENDS[0]
            marks.append((row * (height // (14 * merge_size))).removesuffix(ROW_ENDS[0]) + ROW_ENDS[1])
        written = "".join(part + mark for part, mark in zip(text.split(MARK), [*marks, ""], strict=True))
        return {**seen, "input_ids": tokenizer(written, return_tensors="pt")["input_ids"]}

    return run


@pytest.mark.parametrize("numbers", [[0], [1], [2, 3], [4, 5, 0]])
def test_tokens_and_pixels_are_those_of_transformers(
    numbers: list[int], family: str, path: Path, renderer: Renderer
) -> None:
    images = [IMAGES[number] for number in numbers]
    text = ["", f"a{MARK} b", f"{MARK}x\n{MARK}", f"{MARK}{MARK} and {MARK}."][len(images)]
    rendered = renderer.render_prompt(text, images=images)
    given = json.loads((path / "preprocessor_config.json").read_text())
    theirs = processed(family, path, given, text, images)
    assert rendered.token_ids == theirs["input_ids"][0].tolist()
    ours = reference_inputs(JOINED[family][0], rendered.media, torch.tensor([rendered.token_ids]))
    expected = theirs["pixel_values"]
    if family == "llava_siglip":
        expected = expected[:, :, :56, :56]  # its convolution sees no more
    if "image_sizes" in theirs and family != "llava_next":
        assert torch.equal(ours["image_sizes"], torch.as_tensor(theirs["image_sizes"]))
    torch.testing.assert_close(ours["pixel_values"], expected, atol=2e-6, rtol=0)
    places = [(image.start, image.length) for image in rendered.media]
    marked = [index for index, token in enumerate(rendered.token_ids) if token == IMAGE_TOKEN_ID]
    assert set(marked) <= {index for start, length in places for index in range(start, start + length)}


def seen_by(
    tmp_path: Path, family: str, given: dict[str, Any], image: Image.Image, vision: dict[str, Any] | None = None
) -> Media:
    model_type, text, own, more = JOINED[family]
    config = {"model_type": model_type, "text_config": {"model_type": text}, "image_token_index": 5, **more}
    config["vision_config"] = {**own, **(vision or {})}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    processor = ImageProcessor.find(tmp_path, config)
    assert processor is not None
    return processor.expand([5], [(image, "image")], None)[1][0]


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ({"size": {"shortest_edge": 40}, "crop_size": {"height": 56, "width": 56}}, IMAGES[2]),
        ({"size": {"shortest_edge": 31}, "crop_size": {"height": 56, "width": 56}}, IMAGES[0]),
        ({"size": {"height": 31, "width": 100}, "crop_size": 56}, IMAGES[0]),
        ({"size": 61, "crop_size": 56}, IMAGES[4]),
        ({"size": {"height": 56, "width": 56}, "do_center_crop": False, "resample": 2}, IMAGES[4]),
        ({"size": 57, "crop_size": 56, "resample": 0, "image_mean": [0.1, 0.2, 0.3]}, IMAGES[5]),
    ],
)
def test_pixels_with_other_numbers(given: dict[str, Any], image: Image.Image, tmp_path: Path) -> None:
    """Also black where there is less than is cut out."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    media = seen_by(tmp_path, "llava", {**CLIP, **given}, image)
    theirs = CLIPImageProcessorPil(**given)(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(
        reference_inputs("llava", [media], torch.tensor([]))["pixel_values"], theirs, atol=2e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("family", "given", "why"),
    [
        ("llava", {"size": 56, "crop_size": 60}, "images become 60 x 60 pixels, and the tower sees 56 x 56"),
        ("llava", {"size": 56, "do_center_crop": False}, "images become of a size of their own"),
        ("llava", {}, "images become 224 x 224 pixels"),
        ("llava", {"size": [], "crop_size": 56}, "no image processor's configuration"),
        ("llava", {"size": 10**9, "crop_size": 56}, "size, crop_size: must be from 1 to 4096"),
        ("llava", {"size": 56, "crop_size": {"height": 56}}, "KeyError|'width'"),
        ("llava", {"size": 56, "crop_size": 56, "resample": 9}, "resample=9: must be from 0 to 5"),
        ("llava", {"size": 56, "crop_size": 56, "do_rescale": False}, "do_rescale=false: must be true"),
        ("llava", {"size": 56, "crop_size": 56, "do_normalize": False}, "do_normalize=false: must be true"),
        ("llava", {"size": 56, "crop_size": 56, "image_std": [0, 1, 1]}, "image_std"),
        ("llava", {"image_processor_type": "LlavaImageProcessor", "do_pad": True}, "do_pad=true"),
        ("llava_next", {"size": 56, "crop_size": 56, "image_grid_pinpoints": [[56, 56]]}, "differ from those"),
        ("mistral3", {"size": {"longest_edge": -5}}, "must be at least 1 pixel"),
        ("mistral3", {"size": {"shortest_edge": 5}}, "'height'"),
        ("mistral3", {"size": {"longest_edge": 10**9}}, "max_pixels"),
        ("mistral3", {"size": "large"}, "no image processor's configuration"),
    ],
)
def test_numbers_that_are_none(family: str, given: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=why) as error:
        seen_by(tmp_path, family, given, IMAGES[0])
    assert "\n" not in str(error.value)
    assert "preprocessor_config.json" in str(error.value)


def test_a_thin_image(tmp_path: Path) -> None:
    """A line is a row of squares, and what would be huge before it is cut is refused."""
    line = noise(1, 150)
    assert seen_by(tmp_path, "mistral3", {"size": {"longest_edge": 140}}, line).cells == (1, 5)
    assert seen_by(tmp_path, "llava", {**CLIP, "size": 56, "crop_size": 56}, line).cells == (4, 4)
    wide = {"image_size": 1400}
    with pytest.raises(RequestError, match="may differ by a factor of 8 at most"):
        seen_by(tmp_path, "llava", {**CLIP, "size": 1400, "crop_size": 1400}, line, wide)
    with pytest.raises(RequestError, match="may differ by a factor of 200 at most"):
        seen_by(tmp_path, "mistral3", {"size": {"longest_edge": 140}}, noise(1, 201))


def on_its_side(height: int, width: int) -> tuple[bytes, bytes]:
    """An image that says so before its pixels, and the same that says it behind them."""
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    noise(height, width).save(stream, "png", exif=exif)
    content = stream.getvalue()
    chunk = content[content.index(b"eXIf") - 4 :]
    chunk = chunk[: 12 + int.from_bytes(chunk[:4])]
    return content, content.replace(chunk, b"").replace(b"\0\0\0\0IEND", chunk + b"\0\0\0\0IEND")


def test_one_that_turns_out_to_lie_on_its_side(family: str, renderer: Renderer) -> None:
    """Where the number of its tokens would be another one."""
    content, late = on_its_side(30, 84)
    assert renderer.render_prompt(MARK, images=[content]).media
    if family in ("pixtral", "mistral3", "llava_next"):
        with pytest.raises(RequestError, match="lies on its side, and turned it has another number of tokens"):
            renderer.render_prompt(MARK, images=[late])
    else:
        both = [renderer.render_prompt(MARK, images=[one]).media[0].content_hash for one in (content, late)]
        assert both[0] == both[1]


def test_what_lies_on_its_side_in_a_frame_that_is_square(tmp_path: Path) -> None:
    """Turned it would have as many tokens before its margin is cut, which is on its other sides."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 56, "crop_size": 56}))
    config = {
        "model_type": "llava_next", "text_config": {"model_type": "llama"}, "image_token_index": 5,
        "vision_config": {"image_size": 56, "patch_size": 14}, "image_grid_pinpoints": [[112, 112]],
    }  # fmt: skip
    processor = ImageProcessor.find(tmp_path, config)
    assert processor is not None
    try:
        content, late = on_its_side(30, 84)
        [_, tiles] = processor.expand([5], [(content, "image")], None)[1]
        assert (tiles.cells, tiles.margin) == ((8, 2), [0, 3])
        with pytest.raises(RequestError, match="lies on its side, and turned it has another number of tokens"):
            processor.expand([5], [(late, "image")], None)
        # where nothing is cut, it is what it would have been
        content, late = on_its_side(100, 110)
        both = [processor.expand([5], [(one, "image")], None)[1] for one in (content, late)]
        assert both[0] == both[1]
    finally:
        processor.close()


@pytest.mark.parametrize(("most", "size"), [(25, (5, 5)), (24, (4, 4)), (6, (2, 2)), (1, (1, 1))])
def test_no_image_is_more_than_a_step_may_encode(most: int, size: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 140}}))
    config = {
        "model_type": "mistral3", "text_config": {"model_type": "mistral"}, "vision_config": {"patch_size": 14},
        "image_token_index": 5,
    }  # fmt: skip
    processor = ImageProcessor.find(tmp_path, config, max_image_tokens=most)
    assert processor is not None
    for image in (noise(140, 140), noise(20, 140), noise(140, 20)):
        _, [medium] = processor.expand([5], [(image, "image")], None)
        rows, columns = medium.cells
        assert rows * columns <= most
    assert processor.expand([5], [(noise(140, 140), "image")], None)[1][0].cells == size


@pytest.mark.parametrize(
    ("pinpoints", "why"),
    [
        ([[56, 100]], "56 x 100 are no tiles of 56 x 56 pixels"),
        ([[56 * 9, 56 * 8]], "from 1 to 64 of them"),
        ([[0, 56]], "0 x 56 are no tiles"),
        ([[-56, -56]], "-56 x -56 are no tiles"),
        ([56], "no image processor's configuration"),
        ([], "image_grid_pinpoints: is empty"),
    ],
)
def test_tiles_that_are_none(pinpoints: Any, why: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 56, "crop_size": 56}))
    vision = {"image_size": 56, "patch_size": 14}
    config = {"model_type": "llava_next", "text_config": {"model_type": "llama"}, "vision_config": vision}
    with pytest.raises(ModelError, match=why):
        ImageProcessor.find(tmp_path, {**config, "image_grid_pinpoints": pinpoints})


def test_a_tokenizer_without_ends_of_rows(tmp_path: Path) -> None:
    from quire.testing.tiny_checkpoints import write_tokenizer

    write_tokenizer(tmp_path)
    config = {"model_type": "mistral3", "text_config": {"model_type": "mistral"}, "vision_config": {"patch_size": 14}}
    with pytest.raises(ModelError, match=r"tokenizer: has no \[IMG_BREAK\]"):
        ImageProcessor.find(tmp_path, config, tokenizer=Tokenizer.from_folder(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "text", "tower"),
    [
        ("llava", "opt", "clip_vision_model"),
        ("llava", "llama", "dinov2"),
        ("mistral3", "mistral", "siglip_vision_model"),
    ],
)
def test_other_kinds_are_served_as_text(model_type: str, text: str, tower: str, tmp_path: Path) -> None:
    config = {"text_config": {"model_type": text}, "vision_config": {"model_type": tower}}
    assert ImageSizes.read(tmp_path, {"model_type": model_type, **config}) is None


def test_marks_that_a_client_wrote_are_text(family: str, renderer: Renderer) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": f"look: {MARK} {ROW_ENDS[0]} {ROW_ENDS[1]}"}]}]
    token_ids = renderer.render_prompt(chat).token_ids
    assert not set(range(IMAGE_TOKEN_ID, IMAGE_TOKEN_ID + 6)) & set(token_ids)
