"""Videos against Transformers: frames, their times, and where text goes on behind them, however it is scheduled."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.interfaces.prompts import images_of, videos_of
from quire.testing.image_checkpoints import make_image_checkpoint, make_image_model, reference_inputs
from quire.worker.image_rows import _Images

FAMILIES = ["qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_vl_moe", marks=pytest.mark.nightly)]
NUM_TOKENS = 6
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=1)
WAYS = {
    "at once": {},
    "chunks end within videos": {"max_num_batched_tokens": 5, "block_size": 4, "max_num_seqs": 4},
    "frames of a step": {"max_num_encoder_tokens": 8, "block_size": 4},
    "operator by operator": {"enforce_eager": True, "block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 4},
}


def frames(count: int, height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (count, height, width, 3), dtype=np.uint8)


VIDEO, LONG, IMAGE = frames(6, 60, 120, 1), frames(5, 90, 56, 2), Image.fromarray(frames(1, 60, 60, 3)[0])
AROUND = "<|vision_start|><|video_pad|><|vision_end|>"
PROMPTS = [
    {"prompt": f"a {AROUND} b <|image_pad|> c {AROUND}d", "multi_modal_data": {
        "video": [(VIDEO, {"fps": 8.0}), list(map(Image.fromarray, LONG))], "image": IMAGE}},
    {"prompt": "only text"},
    {"prompt": "x<|video_pad|>", "multi_modal_data": {"video": (VIDEO[:4], {
        "fps": 24.0, "total_num_frames": 20, "frames_indices": [0, 6, 9, 19]})}},
]  # fmt: skip
# of each video of these prompts, as Transformers says it
SAMPLED = [[8.0, 24.0], [], [4 / 20 * 24.0]]
# Its later frames stand further behind its first ones than its rows and columns are many.
SLOW = {"prompt": f"{AROUND} what?", "multi_modal_data": {"video": (VIDEO, {"fps": 2.0})}}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("videos") / family, family)


def rendered_of(llm: LLM, prompt: dict):
    return llm.renderer.render_prompt(prompt["prompt"], images=images_of(prompt), videos=videos_of(prompt))


@torch.inference_mode()
def continued(model, rendered, **given) -> tuple[list[int], list[float]]:
    """Each token from the whole sequence, as no cache can be wrong then."""
    token_ids = list(rendered.token_ids)
    logprobs = []
    for _ in range(NUM_TOKENS):
        ids = torch.tensor([token_ids])
        inputs = reference_inputs(model.config.model_type, rendered.media, ids)
        is_prompt = torch.arange(ids.shape[1]) < len(rendered.token_ids)  # a placeholder that was sampled is text
        inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"] * is_prompt
        more = {name: value(len(token_ids)) if callable(value) else value for name, value in given.items()}
        model.model.rope_deltas = None
        logits = model(input_ids=ids, use_cache=False, **inputs, **more).logits[0, -1]
        token_ids.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1).max()))
    return token_ids[-NUM_TOKENS:], logprobs


@pytest.fixture(scope="module")
def expected(family: str, checkpoint: Path) -> list[tuple[list[int], list[float]]]:
    model = make_image_model(family)
    found = []
    with LLM(str(checkpoint), dtype="float32", max_model_len=256) as llm:
        for prompt, rates in zip(PROMPTS, SAMPLED, strict=True):
            seconds = {"second_per_grid_ts": torch.tensor([2 / rate for rate in rates])}
            found.append(continued(model, rendered_of(llm, prompt), **(seconds if family == "qwen2_5_vl" else {})))
    return found


def check(outputs, expected) -> None:
    for output, (token_ids, logprobs) in zip(outputs, expected, strict=True):
        assert list(output.outputs[0].token_ids) == token_ids
        ours = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, token_ids, strict=True)]
        np.testing.assert_allclose(ours, logprobs, atol=2e-4)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_those_of_transformers(way: str, checkpoint: Path, expected):
    with LLM(str(checkpoint), **{"dtype": "float32", "max_model_len": 256, **WAYS[way]}) as llm:
        for _ in range(2):  # the second time from a warm prefix cache
            check(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)


def test_text_behind_a_slow_video_goes_on_behind_its_last_moment(family: str, checkpoint: Path):
    """As the model was trained; Transformers goes on behind rows and columns in a prompt, and behind the last moment
    with the first token that it makes."""
    model = make_image_model(family)
    with LLM(str(checkpoint), dtype="float32", max_model_len=256, block_size=4, max_num_batched_tokens=16) as llm:
        rendered = rendered_of(llm, SLOW)
        [output] = llm.generate([SLOW], GREEDY, use_tqdm=False)
    positions = _Images.of(rendered.media)

    def position_ids(length: int) -> torch.Tensor:
        return torch.from_numpy(positions.positions(0, length))[:, None]

    if family == "qwen2_5_vl":
        # 4 positions a second, 2 frames at a time, one position for what opens the video
        assert positions.positions_3P[0, 1::8].tolist() == [1, 5, 9]
        assert positions.positions(25, 27)[0].tolist() == [10, 11]
    check([output], [continued(model, rendered, position_ids=position_ids)])


def test_a_video_that_was_seen_is_not_encoded_again(checkpoint: Path):
    """Behind other text, and in another order of its frames: what is kept is named by what is seen."""
    options = {
        "dtype": "float32",
        "max_model_len": 256,
        "block_size": 4,
        "max_num_batched_tokens": 5,
        "max_num_seqs": 4,
    }
    with LLM(str(checkpoint), **options) as llm:
        for text in ("x", "y", "x"):
            prompt = {"prompt": f"{text}<|video_pad|>", "multi_modal_data": {"video": (VIDEO, {"fps": 4.0})}}
            [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert llm.statistics()["num_images_encoded_total"] == 3
        assert output.num_cached_tokens > 20
        again = {**prompt, "multi_modal_data": {"video": (VIDEO[[2, 3, 0, 1]], {"fps": 4.0})}}
        [turned] = llm.generate([again], GREEDY, use_tqdm=False)
        assert llm.statistics()["num_images_encoded_total"] == 3
        assert turned.num_cached_tokens < 20
        assert turned.outputs[0].token_ids != output.outputs[0].token_ids


def test_the_same_frames_at_other_times_are_not_found(checkpoint: Path, family: str):
    prompts = [
        {"prompt": "<|video_pad|>", "multi_modal_data": {"video": (VIDEO, {"fps": rate})}} for rate in (4.0, 2.0)
    ]
    with LLM(str(checkpoint), dtype="float32", max_model_len=256, block_size=4) as llm:
        first, again, other = (
            llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in (prompts[0], prompts[0], prompts[1])
        )
    assert again.num_cached_tokens >= 20
    # the first frames stand where they stood, or the text before them is another one
    assert other.num_cached_tokens <= (8 if family == "qwen2_5_vl" else 0)
    assert other.outputs[0].token_ids != first.outputs[0].token_ids


def test_a_chat_and_tokens_with_a_video(checkpoint: Path, family: str):
    chat = [{"role": "user", "content": [{"type": "video", "video": VIDEO}, {"type": "text", "text": "<|video_pad|>"}]}]
    with LLM(str(checkpoint), dtype="float32", max_model_len=256) as llm:
        [of_chat] = llm.chat(chat, GREEDY, use_tqdm=False)
        text = f"<|im_start|>user\n{AROUND}"
        prompt = {"prompt": text, "multi_modal_data": {"video": VIDEO}}
        [of_text] = llm.generate([prompt], GREEDY, use_tqdm=False)
        token_ids = llm.renderer.encode(text)
        [of_tokens] = llm.generate(
            [{"prompt_token_ids": token_ids, "multi_modal_data": {"video": VIDEO}}], GREEDY, use_tqdm=False
        )
        assert of_tokens.prompt_token_ids == of_text.prompt_token_ids
        length = len(of_text.prompt_token_ids)
        assert of_chat.prompt_token_ids[:length] == of_text.prompt_token_ids
        assert 262 not in of_chat.prompt_token_ids[length:]
        if family != "qwen2_5_vl":
            assert "<0.1 seconds>" in llm.renderer.decode(of_chat.prompt_token_ids)
        with pytest.raises(RequestError, match=r"1 videos need \d+ placeholders in the prompt, and there are 0"):
            llm.generate([{**prompt, "prompt": "none"}], GREEDY)
        with pytest.raises(RequestError, match="5 videos, at most 4 are allowed"):
            llm.generate([{"prompt": "x", "multi_modal_data": {"video": [VIDEO] * 5}}], GREEDY)


def test_other_models_refuse_videos(tmp_path: Path):
    with (
        LLM(str(make_image_checkpoint(tmp_path / "m", "gemma3")), dtype="float32", max_model_len=64) as llm,
        pytest.raises(RequestError, match="takes images and no videos"),
    ):
        llm.generate([{"prompt": "x", "multi_modal_data": {"video": VIDEO}}], GREEDY)
