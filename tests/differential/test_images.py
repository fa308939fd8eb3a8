"""Models with an encoder of images against Transformers, in every way of scheduling."""

import itertools
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import ModelError, RequestError
from quire.testing.image_checkpoints import (
    IMAGE_TOKEN_ID,
    JOINED,
    make_image_checkpoint,
    make_image_model,
    reference_inputs,
)
from quire.worker.models.transformers_checkpoint import IMAGE_MODEL_TYPES

NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=1)
LIBRARY = "through the library"
RANKS = "ranks share the keys"
STAGES = "two stages"
WAYS = {
    "at once": {},
    "chunks of 5 end within images": {"max_num_batched_tokens": 5, "block_size": 4, "max_num_seqs": 4},
    "few blocks: preempted": {
        "block_size": 4,
        "num_gpu_blocks_override": 23,
        "max_model_len": 72,
        "enable_prefix_caching": False,
        "preemption_mode": "recompute",
    },
    "operator by operator": {"enforce_eager": True, "block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 4},
    LIBRARY: {"model_impl": "transformers"},
    "an image a step": {"max_num_encoder_tokens": 8},
    RANKS: {"context_parallel_size": 2, "block_size": 4, "kv_cache_memory_bytes": 16 << 20},
    STAGES: {"pipeline_parallel_size": 2, "block_size": 4, "max_num_batched_tokens": 9, "num_gpu_blocks_override": 200},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


def noise(height: int, width: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


IMAGES = noise(60, 120, 1), noise(90, 56, 2)
PROMPTS = [
    {"prompt": "a <|image_pad|> b <|image_pad|> c", "multi_modal_data": {"image": list(IMAGES)}},
    {"prompt": "only text"},
    {"prompt": "x<|image_pad|>", "multi_modal_data": {"image": IMAGES[1]}},
    {"prompt": "<|image_pad|> and a few more words", "multi_modal_data": {"image": IMAGES[0]}},
]


# one of each kind by default: positions in three dimensions, views at several depths, images as a whole, inputs of each
# layer, a tower of another family; the logits of all stand in tests/worker/models/test_image_models.py
FAMILIES = [
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma3",
    "gemma4",
    "llava",
    *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in (
            "qwen2_vl",
            "qwen3_vl_moe",
            "gemma4_ahead",
            "internvl",
            "internvl_norms",
            "llava_siglip",
            "llava_next",
            "pixtral",
            "mistral3",
        )
    ),
]
# what is said of those that the library does not run under Quire's attention
NOT_IN_LIBRARY = {
    "gemma4": "changes the attention mask by itself",
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", *JOINED), "of models that see images it runs"),
}
TEXT_IN_LIBRARY = ("gemma3", "gemma4_ahead")
# families whose images have up to 16 tokens, which are computed in one step
WHOLE = ("gemma3", "gemma4_ahead")
# of so many blocks the prompts take a little more; groups of layers have blocks of their own
FEW_BLOCKS = {
    "gemma3": 57, "gemma4": 37, "internvl": 27, "internvl_norms": 27, "llava": 29, "llava_siglip": 29, "llava_next": 36,
    "pixtral": 32, "mistral3": 29,
}  # fmt: skip
# tokens of the larger image: with fewer it would be made smaller
LARGER = {"gemma4": 16, "gemma4_ahead": 16, "pixtral": 24, "mistral3": 15}
# of a prompt of one image, and of the same prompt with another
NUM_CACHED = {
    "gemma3": (20, 4), "gemma4": (16, 0), "gemma4_ahead": (0, 0), "llava": (16, 0), "llava_siglip": (16, 0),
    "pixtral": (40, 0), "mistral3": (12, 0), "internvl": (20, 0), "internvl_norms": (20, 0), "llava_next": (88, 0),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("images") / family, family)


@pytest.fixture(scope="module")
def expected(family: str, checkpoint: Path) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities; each from the whole sequence, as no cache can be wrong then."""
    model = make_image_model(family)
    with LLM(str(checkpoint), dtype="float32", max_model_len=128) as llm:
        rendered = [llm.renderer.render_prompt(p["prompt"], images=images_of(p)) for p in PROMPTS]
    return [continued(model, one) for one in rendered]


def images_of(prompt: dict) -> list:
    images = prompt.get("multi_modal_data", {}).get("image", [])
    return images if isinstance(images, list) else [images]


def continued(model, rendered) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs = []
    for _ in range(NUM_TOKENS):
        of_next = logprobs_after(model, rendered, tokens)
        tokens.append(int(of_next.argmax()))
        logprobs.append(float(of_next.max()))
    return tokens, logprobs


@torch.inference_mode()
def logprobs_after(model, rendered, tokens: list[int]) -> torch.Tensor:
    """Of each token that may follow these, which follow a prompt."""
    num_prompt = len(rendered.token_ids)
    ids = torch.tensor([[*rendered.token_ids, *tokens]])
    inputs = reference_inputs(model.config.model_type, rendered.media, ids)
    # a placeholder that was sampled is text
    inputs = {k: v * (torch.arange(ids.shape[1]) < num_prompt) if "type_ids" in k else v for k, v in inputs.items()}
    if model.config.model_type == "gemma4":
        # as `generate` sees it, which has the image behind it: padding
        ids[0, num_prompt:].masked_fill_(ids[0, num_prompt:] == IMAGE_TOKEN_ID, 0)
    model.model.rope_deltas = None
    return model(input_ids=ids, use_cache=False, **inputs).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_those_of_transformers(way: str, checkpoint: Path, family: str, expected):
    if way == LIBRARY and family not in IMAGE_MODEL_TYPES:
        pytest.skip("the test below")
    if way in (RANKS, STAGES) and family == "qwen2_vl":
        pytest.skip("runs through the library, whose layers ranks cannot share")
    if "preempted" in way and family == "gemma4_ahead":
        pytest.skip("two prompts fit where one does, since most of its blocks are those of windows")
    if way == STAGES and family == "gemma4":
        pytest.skip("layers share keys, and have inputs of their own: they cannot be divided")
    with LLM(str(checkpoint), **options_of(way, family)) as llm:
        for _ in range(2):  # the second time from a warm prefix cache
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            check(outputs, expected)
        if "preempted" in way:
            assert llm.statistics()["recomputed_tokens_total"] > 0


def test_layers_that_take_images_are_of_one_stage(family: str, checkpoint: Path):
    if family != "qwen3_vl":
        pytest.skip("images enter before the first layer")
    with pytest.raises(ModelError, match="images enter at the first 2 of 6, which one stage must have"):
        LLM(str(checkpoint), pipeline_parallel_size=3, num_gpu_blocks_override=20)


def test_bits_do_not_depend_on_cuts_company_and_cache(family: str, checkpoint: Path):
    """Log-probabilities, to the last bit: at once, one after the other, cut, and behind what was found."""
    seen = []
    for way in ("at once", "chunks of 5 end within images"):
        with LLM(str(checkpoint), **options_of(way, family)) as llm:
            for prompts in (PROMPTS, *([prompt] for prompt in PROMPTS)):
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                seen += [(PROMPTS.index(p), bits_of(output)) for p, output in zip(prompts, outputs, strict=True)]
    assert len({bits for _, bits in seen}) == len({number for number, _ in seen}) == len(PROMPTS)


def bits_of(output) -> tuple[float, ...]:
    (one,) = output.outputs
    return tuple(step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True))


def test_what_the_library_cannot_do_with_images_is_refused(family: str, checkpoint: Path, expected):
    options = options_of(LIBRARY, family)
    if family in NOT_IN_LIBRARY:
        with pytest.raises(ModelError, match=NOT_IN_LIBRARY[family]):
            LLM(str(checkpoint), **options)
    if family in TEXT_IN_LIBRARY:
        with LLM(str(checkpoint), **options) as llm:
            with pytest.raises(RequestError, match="takes text only"):
                llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
            check(llm.generate(PROMPTS[1:2], GREEDY, use_tqdm=False), expected[1:2])


def options_of(way: str, family: str) -> dict:
    options = {"dtype": "float32", "max_model_len": 128, **WAYS[way]}
    if family == "llava_next":
        # an image is two here
        options["max_model_len"] = 128
    if family in WHOLE and "max_num_batched_tokens" in options:
        options["max_num_batched_tokens"] += 16
    if "max_num_encoder_tokens" in options:
        options["max_num_encoder_tokens"] = LARGER.get(family, options["max_num_encoder_tokens"])
    if "num_gpu_blocks_override" in options and way != STAGES:
        options["num_gpu_blocks_override"] = FEW_BLOCKS.get(family, options["num_gpu_blocks_override"])
    return options


def check(outputs, expected) -> None:
    for output, (token_ids, logprobs) in zip(outputs, expected, strict=True):
        assert list(output.outputs[0].token_ids) == token_ids
        ours = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, token_ids, strict=True)]
        np.testing.assert_allclose(ours, logprobs, atol=2e-4)


def test_beams_and_samples_share_an_image(checkpoint: Path, expected):
    params = SamplingParams(n=3, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LLM(str(checkpoint), dtype="float32", max_model_len=128, block_size=4) as llm:
        (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert [list(one.token_ids) for one in output.outputs] == [expected[0][0]] * 3


def test_beams_are_those_of_a_search_by_hand(family: str, checkpoint: Path):
    """The two best continuations of each step, out of what Transformers gives for whole sequences."""
    model = make_image_model(family)
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    with LLM(str(checkpoint), dtype="float32", max_model_len=128, block_size=4) as llm:
        prompt = llm.renderer.render_prompt(PROMPTS[0]["prompt"], images=images_of(PROMPTS[0]))
        [answer] = llm.beam_search(PROMPTS[:1], params)
    beams = [(0.0, [])]
    for _ in range(4):
        found = []
        for score, tokens in beams:
            best = logprobs_after(model, prompt, tokens).topk(2)
            found += [(score + float(value), [*tokens, int(token)]) for value, token in zip(*best, strict=True)]
        beams = sorted(found, reverse=True)[:2]
    ours = [(beam.cum_logprob, list(beam.tokens)[-4:]) for beam in answer.sequences]
    assert [tokens for _, tokens in ours] == [tokens for _, tokens in beams]
    np.testing.assert_allclose([score for score, _ in ours], [score for score, _ in beams], atol=4e-4)


ALL_FAMILIES = [family if isinstance(family, str) else family.values[0] for family in FAMILIES]
BY_DAY = [("qwen3_vl", "int8", "beams", 1), ("internvl", None, "beams", 2)]


@pytest.mark.parametrize(
    ("name", "quantization", "method", "num_ranks"),
    [
        pytest.param(*case, marks=() if case in BY_DAY else pytest.mark.nightly)
        for case in itertools.product(ALL_FAMILIES, (None, "int8"), ("greedy", "beams"), (1, 2))
        # without codes one rank is above; the library's layers cannot be shared
        if case[1::2] != (None, 1) and (case[0], case[3]) != ("qwen2_vl", 2)
    ],
)
def test_ranks_with_codes_and_beams_answer_as_one_request_alone(
    name: str, quantization: str | None, method: str, num_ranks: int, tmp_path: Path
):
    """Cut and together. Where inputs are rounded to eight bits, sums have an order that ranks do not change."""
    path = make_image_checkpoint(tmp_path / name, name)

    def answers(llm: LLM, prompts: list[dict]) -> list[list[list[int]]]:
        if method == "greedy":
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            return [[list(one.token_ids) for one in output.outputs] for output in outputs]
        params = BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [[list(beam.tokens) for beam in found.sequences] for found in llm.beam_search(prompts, params)]

    stored = {"quantization": quantization, "rank_invariant": quantization is not None}
    with LLM(str(path), dtype="float32", max_model_len=128, **stored) as llm:
        expected = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    options = {**options_of("chunks of 5 end within images", name), "max_num_seqs": 12}
    options["max_num_batched_tokens"] = max(12, options["max_num_batched_tokens"])
    with LLM(str(path), tensor_parallel_size=num_ranks, **stored, **options) as llm:
        assert answers(llm, PROMPTS) == expected
        assert llm.statistics()["num_images_encoded_total"] > 0


def test_other_images_behind_the_same_tokens_are_not_found(family: str, checkpoint: Path):
    """Placeholders are equal; only the image tells the blocks apart."""
    prompts = [{"prompt": "x<|image_pad|>y", "multi_modal_data": {"image": noise(84, 84, seed)}} for seed in (1, 2)]
    with LLM(str(checkpoint), dtype="float32", max_model_len=128, block_size=4) as llm:
        first, again, other = (
            llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in (prompts[0], prompts[0], prompts[1])
        )
    assert first.prompt_token_ids == other.prompt_token_ids
    # whole blocks before the last token, and where an image is whole it is; before it the two are alike
    assert (again.num_cached_tokens, other.num_cached_tokens) == NUM_CACHED.get(family, (8, 0))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids != other.outputs[0].token_ids


def test_encoder_runs_are_counted(family: str, checkpoint: Path):
    """A chunk for a chunk, behind other text, and once more: an image is encoded once. One of InternVL is two tiles,
    and one for the whole; one of LLaVA NeXT is the whole, and its tiles."""
    num_pieces = 3 if family.startswith("internvl") else 2 if family == "llava_next" else 1
    prompts = [{"prompt": f"{head}<|image_pad|>", "multi_modal_data": {"image": IMAGES[0]}} for head in "xyx"]
    with LLM(str(checkpoint), **options_of("chunks of 5 end within images", family)) as llm:
        for prompt in prompts:
            llm.generate([prompt], GREEDY, use_tqdm=False)
            assert llm.statistics()["num_images_encoded_total"] == num_pieces
        llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
        assert llm.statistics()["num_images_encoded_total"] == 2 * num_pieces


def test_images_by_url(checkpoint: Path, tmp_path: Path):
    """Of a named host, or below a named folder; the tokens are those of the image itself."""
    IMAGES[0].save(tmp_path / "a.png")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    options = {"allowed_media_domains": ("127.0.0.1",), "allowed_local_media_path": str(tmp_path)}
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        LLM(str(checkpoint), dtype="float32", max_model_len=128, **options) as llm,
    ):
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.png"
        answers = [
            llm.chat([{"role": "user", "content": [{"type": "image", "image": image}]}], GREEDY, use_tqdm=False)[0]
            for image in (IMAGES[0], url, (tmp_path / "a.png").as_uri())
        ]
        answers += llm.generate(
            [{"prompt": "x<|image_pad|>", "multi_modal_data": {"image": image}} for image in (url, IMAGES[0])],
            GREEDY, use_tqdm=False,
        )  # fmt: skip
        server.shutdown()
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]\.image: .* not among the hosts"):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": "https://evil.test/x"}]}], GREEDY)
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[3] == tokens[4]


def test_a_text_model_refuses_images(tmp_path: Path):
    from quire.testing.tiny_checkpoints import make_checkpoint

    with (
        LLM(str(make_checkpoint(tmp_path / "m", "llama")), dtype="float32", max_model_len=64) as llm,
        pytest.raises(RequestError, match="takes text only"),
    ):
        llm.generate([{"prompt": "x", "multi_modal_data": {"image": IMAGES[0]}}], GREEDY)


def test_a_placeholder_that_a_client_wrote_is_text(checkpoint: Path, family: str):
    with LLM(str(checkpoint), dtype="float32", max_model_len=128) as llm:
        chat = [{"role": "user", "content": "look: <|image_pad|> <|vision_start|>"}]
        rendered = llm.renderer.render_prompt(chat)
        assert IMAGE_TOKEN_ID not in rendered.token_ids
        prompt = "a <|image_pad|> without an image"
        rendered = llm.renderer.render_prompt(prompt)
        assert rendered.token_ids.count(IMAGE_TOKEN_ID) == 1
        assert not rendered.media
        outputs = llm.generate([prompt], GREEDY, use_tqdm=False)
        check(outputs, [continued(make_image_model(family), rendered)])


def test_what_was_made_of_an_image_is_kept_by_salt(checkpoint: Path, family: str):
    """Whoever comes with another salt waits as long as if nobody had ever shown it."""
    image = {"prompt": "x<|image_pad|>", "multi_modal_data": {"image": IMAGES[0]}}
    with LLM(str(checkpoint), **options_of("at once", family)) as llm:
        num_encoded = []
        for salt in ("a", "a", "b", None, None, "a"):
            llm.generate([{**image, "cache_salt": salt} if salt else image], GREEDY, use_tqdm=False)
            num_encoded.append(llm.statistics()["num_images_encoded_total"])
    once = num_encoded[0]
    assert num_encoded == [once, once, 2 * once, 3 * once, 3 * once, 3 * once]
