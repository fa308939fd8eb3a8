"""Images through the whole engine: greedy tokens are those of Transformers in every way of scheduling."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire import LLM, BeamSearchParams, SamplingParams
from quire.testing.tiny_checkpoints import IMAGE_TOKEN_ID, VISION_END_ID, VISION_START_ID, make_checkpoint

_IMAGE = [VISION_START_ID, IMAGE_TOKEN_ID, VISION_END_ID]
_GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
_OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 160, "block_size": 4, "num_gpu_blocks_override": 160, "max_num_seqs": 8,
    "engine_process": False, "check_invariants": True, "seed": 0,
}  # fmt: skip


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def prompt(tokens: list[int], *images: Image.Image) -> dict[str, Any]:
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": list(images)}}


# Each image has 8 x 8 or fewer tokens; blocks of 4 begin and end within them.
PROMPTS = [
    prompt([*range(40, 52), *_IMAGE, *range(60, 75)], picture(56, 40)),
    prompt([*_IMAGE, 70, 71, *_IMAGE, *range(90, 99)], picture(33, 90, 1), picture(64, 64, 2)),
    {"prompt_token_ids": list(range(30, 60))},
    prompt([*range(40, 52), *_IMAGE, *range(60, 75)], picture(56, 40, 3)),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("vl") / "model", "qwen2_5_vl")


@pytest.fixture(scope="module")
def open_llm(path: Path) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def make(**options: Any) -> LLM:
        opened.append(LLM(str(path), **{**_OPTIONS, **options}))
        return opened[-1]

    yield make
    for llm in opened:
        llm.shutdown()


@pytest.fixture(scope="module")
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm()


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """What Transformers continues with, computing everything anew for each token."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(path)
    return [_continued(model, processor, given) for given in PROMPTS]


def _continued(model: Any, processor: Any, given: dict[str, Any]) -> list[int]:
    images = given.get("multi_modal_data", {}).get("image", [])
    extra = dict(processor(images=images, return_tensors="pt")) if images else {}
    counts = iter([int(grid.prod()) // 4 for grid in extra.get("image_grid_thw", [])])
    tokens: list[int] = []
    for token in given["prompt_token_ids"]:
        tokens += [token] * (next(counts) if token == IMAGE_TOKEN_ID else 1)
    length = len(tokens)
    for _ in range(_GREEDY.max_tokens or 0):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            kinds = (ids == IMAGE_TOKEN_ID).int()
            # what is generated is text, whatever its id
            kinds[:, length:] = 0
            logits = model(ids, use_cache=False, mm_token_type_ids=kinds, **extra).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[length:]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"long_prefill_token_threshold": 5, "async_scheduling": True},
        {"enable_prefix_caching": False, "block_size": 16, "enforce_eager": True},
        {"num_gpu_blocks_override": 40, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 40, "preemption_mode": "swap"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["plain", "chunks", "threshold", "eager", "recomputed", "swapped", "drafts"],
)
def test_greedy_tokens_are_those_of_transformers(
    options: dict[str, Any], open_llm: Callable[..., LLM], expected: list[list[int]]
) -> None:
    llm = open_llm(**options)
    assert tokens_of(llm.generate(PROMPTS, _GREEDY, use_tqdm=False)) == expected
    # once more: whatever the cache holds by now
    assert tokens_of(llm.generate(PROMPTS, _GREEDY, use_tqdm=False)) == expected
    if "preemption_mode" in options:
        assert llm.statistics()["num_preemptions_total"] > 0
    llm.shutdown()


def test_the_same_image_is_encoded_once_and_another_shares_no_block(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    (first,) = llm.generate(PROMPTS[0], _GREEDY, use_tqdm=False)
    assert llm.statistics()["num_encoder_runs_total"] == 1
    # behind other text, so that no block is found: the image is not encoded again
    moved = prompt([9, *PROMPTS[0]["prompt_token_ids"]], picture(56, 40))
    (output,) = llm.generate(moved, _GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0
    assert llm.statistics()["num_encoder_runs_total"] == 1
    # the same tokens with another image: the blocks before the image are found, and none that it touches
    (output,) = llm.generate(PROMPTS[3], _GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 12
    assert llm.statistics()["num_encoder_runs_total"] == 2
    (again,) = llm.generate(PROMPTS[0], _GREEDY, use_tqdm=False)
    assert again.num_cached_tokens > len(PROMPTS[0]["prompt_token_ids"])
    assert tokens_of([again]) == tokens_of([first]) != tokens_of([output])
    llm.shutdown()


def test_forks_and_beams(llm: LLM, expected: list[list[int]]) -> None:
    n = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, n=3)
    (output,) = llm.generate(PROMPTS[1], n, use_tqdm=False)
    assert [list(one.token_ids) for one in output.outputs] == [expected[1]] * 3
    (beams,) = llm.generate(PROMPTS[1], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True), use_tqdm=False)
    (wide,) = llm.generate(PROMPTS[1], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert len({tuple(one.token_ids) for one in beams.outputs}) == 3
    assert [one.token_ids for one in beams.outputs] == [one.token_ids for one in wide.outputs]


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def image_part(image: Image.Image | str, kind: str = "PNG") -> dict[str, Any]:
    url = image if isinstance(image, str) else data_url(image, kind)
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_chat_is_the_prompt_that_its_template_writes(llm: LLM) -> None:
    text = "<|im_start|>user\nWhat is <|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n<|im_start|>assistant\n"
    image = picture(56, 40)
    plain = llm.generate({"prompt": text, "multi_modal_data": {"image": image}}, _GREEDY, use_tqdm=False)
    parts = {"type": "text", "text": "What is "}, image_part(image), {"type": "text", "text": "?"}
    answer = llm.chat(chat(*parts), _GREEDY, use_tqdm=False)
    assert answer[0].prompt_token_ids == plain[0].prompt_token_ids
    assert tokens_of(answer) == tokens_of(plain)
