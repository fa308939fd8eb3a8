"""Qwen 2.5 VL against Transformers: logits of prompts with no, one and two images, in one step with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire.messages import AdmittedSequence, ImageItem
from quire.renderer.images import ImageProcessor, ImageRenderer, ImageSource
from quire.sampling_params import SamplingParams
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import IMAGE_TOKEN_ID, VISION_END_ID, VISION_START_ID, make_checkpoint
from quire.worker.images import images_of
from quire.worker.input_batch import InputBatch
from quire.worker.model_loader import load_model

_IMAGE = [VISION_START_ID, IMAGE_TOKEN_ID, VISION_END_ID]
_ATOL = 2e-4


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("vl") / "model", "qwen2_5_vl")


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return load_model(worker_config(path))


def rendered(path: Path, tokens: list[int], images: list[Image.Image]) -> tuple[list[int], list[ImageItem]]:
    renderer = ImageRenderer(ImageProcessor.read(path), IMAGE_TOKEN_ID, 4)
    return renderer.place(tokens, [ImageSource(image, "image") for image in images], None)


def transformers_logits(path: Path, reference: Any, tokens: list[int], images: list[Image.Image]) -> torch.Tensor:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ids = torch.tensor([tokens])
    extra: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE_TOKEN_ID).int()}
    if images:
        extra |= Qwen2VLImageProcessorPil.from_pretrained(path)(images=images, return_tensors="pt")
    with torch.no_grad():
        return reference(ids, use_cache=False, **extra).logits[0]


class ImageHarness(ModelHarness):
    """The same with the images of each sequence."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.images = images_of(model, 8)
        self.forward = model.forward

    def admit(self, sequence: int, media: list[ImageItem]) -> None:
        self.images.admit(admitted(sequence, media))

    def step(self, chunks: dict[int, Any]) -> dict[int, torch.Tensor]:
        first = np.array([len(self.tokens[sequence]) for sequence in chunks])
        counts = [len(chunk) for chunk in chunks.values()]

        def with_images(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            batch = step_batch(list(chunks), counts, first, input_ids, positions)
            return self.forward(input_ids, *self.images.inputs(batch))

        self.model.forward = with_images
        try:
            return super().step(chunks)
        finally:
            self.model.forward = self.forward


def admitted(row: int, media: list[ImageItem]) -> AdmittedSequence:
    return AdmittedSequence(
        row=row, sequence_id=row, token_ids=np.zeros(1, dtype=np.int64), num_prompt_tokens=1, num_computed_tokens=0,
        sampling=SamplingParams(), seed=0, media=media,
    )  # fmt: skip


def step_batch(rows: list[int], counts: list[int], first: Any, ids: torch.Tensor, positions: torch.Tensor) -> Any:
    none = np.zeros(0, dtype=np.int64)
    return InputBatch(
        rows_S=np.array(rows), num_tokens_S=np.array(counts), num_computed_S=first,
        query_starts_S1=np.cumsum([0, *counts]).astype(np.int32), num_drafts_S=none, has_drafts=False,
        sampling_rows_N=none, lengths_N=none, input_ids_T=ids, positions_T=positions,
        logits_indices_N=torch.zeros(0), attention=(),
    )  # fmt: skip


PROMPTS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "none": (list(range(30, 70)), []),
    "one": ([*range(40, 52), *_IMAGE, *range(60, 75)], [(56, 40)]),
    "two": ([*_IMAGE, 70, 71, *_IMAGE, *range(90, 99)], [(33, 90), (64, 64)]),
    "side by side": ([5, *_IMAGE, *_IMAGE], [(40, 24), (200, 100)]),
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_logits_are_those_of_transformers(
    name: str, chunk_size: int | None, path: Path, reference: Any, model: Any
) -> None:
    tokens, sizes = PROMPTS[name]
    images = [picture(*size, seed=number) for number, size in enumerate(sizes)]
    tokens, media = rendered(path, tokens, images)
    expected = transformers_logits(path, reference, tokens, images)
    harness = ImageHarness(model)
    harness.admit(0, media)
    torch.testing.assert_close(harness.run(0, tokens, chunk_size), expected, atol=_ATOL, rtol=0)


def test_text_beside_an_image_keeps_its_bits(path: Path, model: Any) -> None:
    text = list(range(30, 60))
    alone = ImageHarness(model).run(0, text)
    tokens, media = rendered(path, *PROMPTS["one"][:1], [picture(56, 40)])
    harness = ImageHarness(model)
    harness.admit(1, media)
    assert torch.equal(harness.step({0: text, 1: tokens})[0], alone)


def test_all_in_one_step(path: Path, reference: Any, model: Any) -> None:
    harness = ImageHarness(model)
    chunks, expected = {}, {}
    for row, (tokens, sizes) in enumerate(PROMPTS.values()):
        images = [picture(*size, seed=row) for size in sizes]
        chunks[row], media = rendered(path, tokens, images)
        harness.admit(row, media)
        expected[row] = transformers_logits(path, reference, chunks[row], images)
    for row, logits in harness.step(chunks).items():
        torch.testing.assert_close(logits, expected[row], atol=_ATOL, rtol=0)


def test_another_image_gives_other_logits(path: Path, model: Any) -> None:
    found = []
    for seed in (1, 2):
        tokens, media = rendered(path, PROMPTS["one"][0], [picture(56, 40, seed)])
        harness = ImageHarness(model)
        harness.admit(0, media)
        found.append(harness.run(0, tokens)[-1])
    assert (found[0] - found[1]).abs().max() > 0.01
