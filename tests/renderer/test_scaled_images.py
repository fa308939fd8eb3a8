"""Images of Gemma 4: the pixels and the tokens that Transformers' processor makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.image_processors import noise, processor_of

from quire.config import EngineOptions, resolve
from quire.errors import ModelError, RequestError
from quire.renderer import Renderer
from quire.renderer.image_processor import ImageProcessor
from quire.testing.image_checkpoints import GEMMA4, IMAGE_TOKEN_ID, MARKS, make_image_checkpoint
from quire.worker.image_rows import pixels_of

MARK, OPENING, CLOSING = MARKS
MARK_ID, OPENING_ID, CLOSING_ID = range(IMAGE_TOKEN_ID, IMAGE_TOKEN_ID + 3)
NUMBERS = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
# the least that Transformers takes
CONFIG = {
    "model_type": GEMMA4,
    "image_token_id": MARK_ID,
    "boi_token_id": OPENING_ID,
    "eoi_token_id": CLOSING_ID,
    "vision_config": {"patch_size": 4, "pooling_kernel_size": 2},
    "text_config": {},
}


def found(folder: Path, numbers: Any = NUMBERS, **more: Any) -> ImageProcessor:
    return processor_of(folder, numbers, {**CONFIG, **more})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("images") / GEMMA4, GEMMA4)


def by_row(media: Any) -> torch.Tensor:
    """[patches, side * side * colours] row by row, as Transformers has them."""
    rows, columns = media.cells
    merge = media.merge_size
    squares = pixels_of(media, torch.device("cpu")).view(rows, columns, merge, merge, 3, -1)
    return squares.permute(0, 2, 1, 3, 5, 4).flatten(4).flatten(0, 3)


SIZES = [(150, 120), (56, 56), (9, 8), (1, 1), (300, 111), (3000, 10), (7, 2000), (1, 3000), (640, 1)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_normalised", [False, True])
def test_pixels_and_their_number_are_those_of_transformers(
    size: tuple[int, int], is_normalised: bool, tmp_path: Path
) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    more = {"do_normalize": is_normalised, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}
    image = noise(*size)
    theirs = Gemma4ImageProcessorPil(**NUMBERS, **more)(image, return_tensors="pt")
    tokens, (media,) = found(tmp_path, {**NUMBERS, **more}).expand([7, MARK_ID, 8], [(image, "x")], None)
    assert media.length == int(theirs["num_soft_tokens_per_image"][0])
    assert tokens == [7, OPENING_ID, *[MARK_ID] * media.length, CLOSING_ID, 8]
    assert media.start == 2
    ours = by_row(media)
    torch.testing.assert_close(ours, theirs["pixel_values"][0, : len(ours)].float(), atol=2e-6, rtol=0)
    places = theirs["image_position_ids"][0, : len(ours)]
    assert (places >= 0).all()
    assert (theirs["image_position_ids"][0, len(ours) :] == -1).all()
    assert media.grid == [1, int(places[:, 1].max()) + 1, int(places[:, 0].max()) + 1]


def test_marks_of_a_text_and_of_a_chat(path: Path) -> None:
    config, _ = resolve(EngineOptions(model=str(path), max_model_len=128))
    renderer = Renderer.from_config(config)
    images = [noise(60, 90), noise(80, 80)]
    rendered = renderer.render_prompt(f"a {MARK}{MARK} b", images=images)
    lengths = [medium.length for medium in rendered.media]
    opened = [[OPENING_ID, *[MARK_ID] * length, CLOSING_ID] for length in lengths]
    assert lengths == [12, 16]
    assert rendered.token_ids[2:-2] == [*opened[0], *opened[1]]
    assert renderer.render_tokens([5, MARK_ID, 6], images[:1], None).token_ids == [5, *opened[0], 6]
    chat = [{"role": "user", "content": [{"type": "image", "image": images[0]}, {"type": "text", "text": MARK}]}]
    assert renderer.render_prompt(chat).token_ids.count(MARK_ID) == 12
    with pytest.raises(RequestError, match=r"images and no videos"):
        renderer.render_prompt([{"role": "user", "content": [{"type": "video", "video": [images[0]] * 4}]}])


def test_tokens_see_each_other_where_the_model_says_so(tmp_path: Path) -> None:
    for given, is_whole in (("vision", True), (None, False)):
        processor = found(tmp_path, text_config={"use_bidirectional_attention": given})
        (media,) = processor.expand([MARK_ID], [(noise(9, 9), "x")], None)[1]
        assert media.is_whole == is_whole


def test_no_image_has_more_tokens_than_a_step_encodes(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(NUMBERS))
    bounded = ImageProcessor.find(tmp_path, CONFIG, max_image_tokens=20)
    same = found(tmp_path, {**NUMBERS, "max_soft_tokens": 20})
    image = [(noise(90, 60), "x")]
    assert bounded is not None
    assert bounded.expand([MARK_ID], image, None) == same.expand([MARK_ID], image, None)


def test_a_model_without_a_tower_takes_no_images(tmp_path: Path) -> None:
    assert ImageProcessor.find(tmp_path, {**CONFIG, "vision_config": None}) is None


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"max_soft_tokens": 0}, "max_soft_tokens=0: must be from 1 to 5120"),
        ({"max_soft_tokens": 5121}, "max_soft_tokens=5121"),
        ({"max_soft_tokens": "many"}, "invalid literal"),
        ({"patch_size": 8}, "patch_size=8, pooling_kernel_size=2: must be those of vision_config"),
        ({"pooling_kernel_size": 3}, "pooling_kernel_size=3"),
        ({"resample": 9}, "resample=9: must be from 0 to 5"),
        ({"do_resize": False}, "do_resize=false: must be true"),
        ({"rescale_factor": 1.0}, "rescale_factor=1.0: must be 1/255"),
        ({"do_normalize": True, "image_std": [0, 1, 1]}, "image_std"),
    ],
)
def test_numbers_that_cannot_be(numbers: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        found(tmp_path, {**NUMBERS, **numbers})
    assert str(caught.value).startswith(str(tmp_path / "preprocessor_config.json"))
