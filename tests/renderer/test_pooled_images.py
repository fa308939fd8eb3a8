"""Images of Gemma 3: the pixels and the tokens that Transformers' processor makes of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from quire.config import EngineOptions, resolve
from quire.errors import ModelError, RequestError
from quire.renderer import Renderer
from quire.renderer.image_processor import ImageProcessor
from quire.testing.image_checkpoints import GEMMA, IMAGE_TOKEN_ID, MARKS, make_image_checkpoint, reference_inputs

OPENING, CONTENT, CLOSING = MARKS
OPENING_ID, CONTENT_ID, CLOSING_ID = range(IMAGE_TOKEN_ID, IMAGE_TOKEN_ID + 3)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("images") / GEMMA, GEMMA)


@pytest.fixture(scope="module")
def renderer(path: Path) -> Renderer:
    config, _ = resolve(EngineOptions(model=str(path), max_model_len=128))
    return Renderer.from_config(config)


def processed(path: Path, text: str, images: list[Image.Image]) -> dict:
    """By Transformers."""
    from transformers import AutoTokenizer
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    tokenizer = AutoTokenizer.from_pretrained(path)
    for name, token, number in zip(("boi", "image", "eoi"), MARKS, range(OPENING_ID, CLOSING_ID + 1), strict=True):
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", number)
    pixels = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    processor = Gemma3Processor(pixels, tokenizer, image_seq_length=16)
    return processor(images=[images], text=[text], return_tensors="pt", add_special_tokens=True)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [(f"a {OPENING} b", [(60, 120)]), (f"{OPENING}", [(56, 56)]), (f"x\n{OPENING}{OPENING}\ny", [(300, 111), (9, 8)])],
)
def test_tokens_and_pixels_are_those_of_transformers(
    text: str, sizes: list[tuple[int, int]], path: Path, renderer: Renderer
) -> None:
    images = [noise(*size, seed) for seed, size in enumerate(sizes)]
    rendered = renderer.render_prompt(text, images=images)
    theirs = processed(path, text, images)
    assert rendered.token_ids == theirs["input_ids"][0].tolist()
    ours = reference_inputs(GEMMA, rendered.media, torch.tensor([rendered.token_ids]))
    assert torch.equal(ours["token_type_ids"][0], theirs["token_type_ids"][0])
    torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"], atol=2e-6, rtol=0)
    assert all(image.is_whole and image.cells == (4, 4) for image in rendered.media)


def test_a_mark_that_a_client_wrote_is_text(renderer: Renderer) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": f"look: {OPENING} {CONTENT}"}]}]
    assert not {OPENING_ID, CONTENT_ID} & set(renderer.render_prompt(chat).token_ids)


def test_a_prompt_of_tokens_may_close_an_image_or_leave_that_out(renderer: Renderer) -> None:
    (image,) = [noise(20, 30)]
    expected = [5, OPENING_ID, *[CONTENT_ID] * 16, CLOSING_ID, 6]
    for token_ids in ([5, OPENING_ID, 6], [5, OPENING_ID, CLOSING_ID, 6]):
        assert renderer.render_tokens(token_ids, [image], None).token_ids == expected


def test_what_does_not_fit(path: Path, renderer: Renderer) -> None:
    with pytest.raises(RequestError, match="1 images for 2 placeholders"):
        renderer.render_prompt(OPENING * 2, images=[noise(9, 9)])
    with pytest.raises(RequestError, match="becomes 16 tokens"):
        renderer.render_prompt(OPENING, images=[noise(9, 9)], max_tokens=12)


def test_the_filter_is_the_one_that_is_named(path: Path, tmp_path: Path) -> None:
    """0 is one as well."""
    config = json.loads((path / "config.json").read_text())
    filters = []
    for given in ({}, {"resample": 0}, {"resample": 3}, {"resample": None}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
        processor = ImageProcessor.find(tmp_path, config)
        assert processor is not None
        filters.append(processor.resample)
    assert filters == [2, 0, 3, 2]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": 9}))
    with pytest.raises(ModelError, match="resample=9: must be from 0 to 5"):
        ImageProcessor.find(tmp_path, config)


def test_pieces_of_images_are_not_built(path: Path, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_pan_and_scan": True}))
    with pytest.raises(ModelError, match="do_pan_and_scan=true"):
        ImageProcessor.find(tmp_path, json.loads((path / "config.json").read_text()))
