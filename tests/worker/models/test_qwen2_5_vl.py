"""Qwen 2.5 VL's own file against Transformers: logits with no, one and two images, cut and mixed in any way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire.messages import AdmittedSequence, Media
from quire.renderer.image_processor import ImageProcessor
from quire.sampling_params import SamplingParams
from quire.testing.image_checkpoints import IMAGE_TOKEN_ID, make_image_checkpoint
from quire.testing.model_harness import ModelHarness, worker_config
from quire.worker.image_rows import ImageRows, pixels_of
from quire.worker.input_batch import InputBatch
from quire.worker.model_loader import load_model
from quire.worker.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from quire.worker.state_cache import NoStateBatch

_ATOL = 2e-4
_IMAGE = IMAGE_TOKEN_ID
PROMPTS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "none": (list(range(30, 70)), []),
    "one": ([*range(40, 52), _IMAGE, *range(60, 75)], [(150, 120)]),
    "two": ([_IMAGE, 70, 71, _IMAGE, *range(90, 99)], [(60, 200), (112, 112)]),
    "close together": ([5, _IMAGE, 8, _IMAGE], [(90, 56), (300, 100)]),
}


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("vl") / "model")


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return load_model(worker_config(path))


def rendered(path: Path, name: str, seed: int = 0) -> tuple[list[int], list[Media]]:
    tokens, sizes = PROMPTS[name]
    processor = ImageProcessor.find(path, {"model_type": "qwen2_5_vl", "image_token_id": IMAGE_TOKEN_ID})
    assert processor is not None
    sources = [(noise(*size, seed + number), "image") for number, size in enumerate(sizes)]
    return processor.expand(tokens, sources, None)


def transformers_logits(reference: Any, tokens: list[int], media: list[Media]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    inputs: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE_TOKEN_ID).int()}
    if media:
        pixels = [pixels_of(image, torch.device("cpu")) for image in media]
        inputs["pixel_values"] = torch.cat(pixels)
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in media])
    with torch.no_grad():
        return reference(ids, use_cache=False, **inputs).logits[0]


class ImageHarness(ModelHarness):
    """The same with the images of each sequence."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.images = ImageRows(model, torch.device("cpu"))
        self.forward = model.forward

    def admit(self, row: int, media: list[Media]) -> None:
        sequence = AdmittedSequence(
            row=row, sequence_id=row, token_ids=np.zeros(1, dtype=np.int64), num_prompt_tokens=1,
            num_computed_tokens=0, sampling=SamplingParams(), seed=0, media=media,
        )  # fmt: skip
        self.images.admit(sequence)

    def step(self, chunks: dict[int, Any]) -> dict[int, torch.Tensor]:
        first = np.array([len(self.tokens[sequence]) for sequence in chunks])
        counts = np.array([len(chunk) for chunk in chunks.values()])

        def with_images(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.forward(*self.images.of(step_batch(list(chunks), counts, first, input_ids, positions)))

        self.model.forward = with_images
        try:
            return super().step(chunks)
        finally:
            self.model.forward = self.forward


def step_batch(rows: list[int], counts: Any, first: Any, ids: torch.Tensor, positions: torch.Tensor) -> InputBatch:
    none = np.zeros(0, dtype=np.int64)
    return InputBatch(
        rows_S=np.array(rows), num_tokens_S=counts, num_computed_S=first,
        query_starts_S1=np.cumsum([0, *counts]).astype(np.int32), num_drafts_S=none, has_drafts=False,
        sampling_rows_N=none, lengths_N=none, input_ids_T=ids, positions_T=positions,
        logits_indices_N=torch.zeros(0), attention=(), states=NoStateBatch(), adapter_slots_T=None,
    )  # fmt: skip


def test_it_is_the_file_that_runs(model: Any) -> None:
    assert isinstance(model, Qwen2_5_VLForConditionalGeneration)


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_logits_are_those_of_transformers(
    name: str, chunk_size: int | None, path: Path, reference: Any, model: Any
) -> None:
    tokens, media = rendered(path, name)
    harness = ImageHarness(model)
    harness.admit(0, media)
    logits = harness.run(0, tokens, chunk_size)
    torch.testing.assert_close(logits, transformers_logits(reference, tokens, media), atol=_ATOL, rtol=0)


def test_all_in_one_step(path: Path, reference: Any, model: Any) -> None:
    harness = ImageHarness(model)
    chunks, expected = {}, {}
    for row, name in enumerate(PROMPTS):
        chunks[row], media = rendered(path, name, seed=row)
        harness.admit(row, media)
        expected[row] = transformers_logits(reference, chunks[row], media)
    for row, logits in harness.step(chunks).items():
        torch.testing.assert_close(logits, expected[row], atol=_ATOL, rtol=0)


def test_text_beside_an_image_keeps_its_bits(path: Path, model: Any) -> None:
    text = list(range(30, 60))
    alone = ImageHarness(model).run(0, text)
    tokens, media = rendered(path, "one")
    harness = ImageHarness(model)
    harness.admit(1, media)
    assert torch.equal(harness.step({0: text, 1: tokens})[0], alone)


def test_another_image_gives_other_logits(path: Path, model: Any) -> None:
    last = []
    for seed in (1, 2):
        tokens, media = rendered(path, "one", seed)
        harness = ImageHarness(model)
        harness.admit(0, media)
        last.append(harness.run(0, tokens)[-1])
    assert (last[0] - last[1]).abs().max() > 0.01


def test_a_config_in_the_older_spelling(path: Path, tmp_path: Path, model: Any) -> None:
    """Keys of the text beside those of the model, and M-RoPE by its old name: as it is published."""
    import json
    import shutil

    folder = tmp_path / "older"
    shutil.copytree(path, folder)
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    sections = text.pop("rope_parameters")["mrope_section"]
    text |= {"rope_theta": 10_000.0, "rope_scaling": {"type": "mrope", "mrope_section": sections}}
    (folder / "config.json").write_text(json.dumps({**text, **config}))
    tokens, media = rendered(path, "two")
    logits = []
    for one in (model, load_model(worker_config(folder))):
        harness = ImageHarness(one)
        harness.admit(0, media)
        logits.append(harness.run(0, tokens))
    assert torch.equal(*logits)
