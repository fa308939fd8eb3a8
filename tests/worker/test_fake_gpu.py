"""Whole steps of every native model on a GPU that is not there: nothing waits for the device but the end of a step."""

import json
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.eagle_checkpoints import make_eagle_head
from tests.support.worker_driver import WorkerDriver

from quire.config import SpeculationConfig
from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.messages import Media
from quire.renderer.image_processor import ImageProcessor
from quire.renderer.tokenizer import Tokenizer
from quire.sampling_params import SamplingParams
from quire.state_layout import state_layout
from quire.testing.image_checkpoints import IMAGE_TOKEN_ID, JOINED, make_image_checkpoint
from quire.testing.model_harness import worker_config
from quire.testing.source_checkpoints import make_source_model
from quire.testing.speech_checkpoints import EN, NUM_SOURCES, START, TRANSCRIBE, make_speech_model
from quire.testing.tiny_adapters import make_adapter
from quire.testing.tiny_checkpoints import ARCHITECTURES, make_checkpoint, make_config
from quire.testing.tiny_encoders import ENCODERS, make_encoder
from quire.thought_marks import ThoughtMarks
from quire.worker.models.registry import native_class, native_model_types
from quire.worker.worker import Worker

NUM_BLOCKS = 4000
# one checkpoint for each native model_type that generates text
NAMES = sorted(
    {model_type: name for name, (model_type, _) in reversed(ARCHITECTURES.items())}[model_type]
    for model_type in native_model_types()
    if model_type in {known for known, _ in ARCHITECTURES.values()} - {"bert"}
)
# What they do on the way to a token differs: experts, latent vectors, three kinds of recurrences, shared keys.
SAMPLED = ("llama", "gpt_oss", "deepseek_v3", "qwen3_next", "bamba")
WAYS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_tokens": 50, "logit_bias": {5: 2.0}},
    {"temperature": 1.0, "allowed_token_ids": list(range(40, 200)), "bad_words": []},
)


def started(path, lookahead=0, **options):
    options = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "auto", "load_format": "dummy"} | options
    worker = Worker(worker_config(path, **({"max_num_batched_tokens": 64} | options)))
    worker.load()
    capacity = worker.measure_capacity()
    groups, _ = make_groups(capacity.layers)
    names = [list(group.layer_names) for group in groups]
    states = state_layout(capacity.layers, names, 4)
    worker.initialize_cache(names, NUM_BLOCKS, 200)
    return WorkerDriver(
        worker,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=200,
        num_groups=len(groups),
        num_state_blocks=states.num_blocks if states else 0,
        lookahead=lookahead,
    )


def text_of(row):
    """A prompt, and what is said of it."""
    return [7 + row] * (9 + row), {}


def a_life(driver, prompt_of=text_of):
    """Prompts of four ways of sampling in pieces, tokens, a fork, swapping out and in; how many steps it took."""

    def step(grants=None):
        output = driver.step(grants)
        assert not output.failures, output.failures

    for row, way in enumerate(WAYS):
        tokens, fields = prompt_of(row)
        driver.admit(row, tokens, sampling=SamplingParams(max_tokens=60, **way), **fields)
    step(dict.fromkeys(range(len(WAYS)), 5))
    step()
    step()
    driver.fork(0, 5, len(driver.tokens[0]))
    step()
    driver.swap_out(3)
    step()
    driver.swap_in(3)
    step()
    for row in (*range(len(WAYS)), 5):
        driver.release(row)
    driver.step({})
    return 5  # the first samples nothing, and waits for nothing


@pytest.fixture
def gpu(monkeypatch):
    if find_spec("triton") is None:
        pytest.skip('needs triton: pip install "quire[gpu-dev]"')
    from tests.support.fake_gpu import fake_gpu

    with fake_gpu(monkeypatch) as device:
        yield device


@pytest.fixture
def config(request, tmp_path):
    """Before anything is fake."""
    make_config(request.param).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "config",
    [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.nightly) for name in NAMES],
    indirect=True,
)
def test_a_step_waits_once(config, gpu):
    driver = started(config)
    a_life(driver)
    gpu.num_waits = 0
    gpu.work.is_strict = True
    num_steps = a_life(driver)
    assert gpu.num_waits == num_steps
    assert gpu.work.num_launches > 100


@pytest.mark.parametrize(
    ("config", "options", "products"),
    [
        ("llama", {"quantization": "int8"}, {"_round_inputs", "_packed_linear"}),
        pytest.param("llama", {"quantization": "int4"}, {"_round_inputs", "_packed_linear"}, marks=pytest.mark.nightly),
        ("deepseek_v3", {"quantization": "int4_weight_only"}, {"_packed_linear", "_grouped_linear"}),
        pytest.param("llama", {"QUIRE_GPU_PRODUCTS": "fixed"}, {"_packed_linear"}, marks=pytest.mark.nightly),
    ],
    indirect=["config"],
    ids=["int8", "int4", "experts of 4 bits", "fixed order"],
)
def test_a_step_of_packed_weights_waits_once(config, options, products, gpu, monkeypatch):
    if "QUIRE_GPU_PRODUCTS" in options:
        monkeypatch.setenv("QUIRE_GPU_PRODUCTS", options["QUIRE_GPU_PRODUCTS"])
        options = {}
    driver = started(config, **options)
    a_life(driver)
    gpu.num_waits = 0
    gpu.work.is_strict = True
    gpu.work.specialised.clear()
    num_steps = a_life(driver)
    assert gpu.num_waits == num_steps
    assert products <= {kernel for kernel, *_ in gpu.work.specialised}


def media(shape, pixels, length):
    return Media(
        start=0, length=length, pixels=pixels, shape=shape, mean=[], std=[], grid=[], merge_size=1,
        content_hash=pixels[:8] + bytes([length]),
    )  # fmt: skip


def sound_of(row):
    pixels = np.full(80 * 2 * NUM_SOURCES, row, dtype=np.float32).tobytes()
    return [0] * NUM_SOURCES + [START, EN, TRANSCRIBE], {"media": [media([80, 2 * NUM_SOURCES], pixels, NUM_SOURCES)]}


def source_of(row):
    ids = np.full(6 + row, 7 + row, dtype=np.int32)
    return [0] * len(ids) + [3, 7, 8], {"media": [media([len(ids)], ids.tobytes(), len(ids))]}


# whose prompts an encoder reads: a checkpoint, and prompts
SOURCES = {
    "whisper": (make_speech_model, sound_of),
    **{kind: (partial(make_source_model, kind), source_of) for kind in ("t5", "mt5", "umt5")},
}


@pytest.fixture
def sources(request, tmp_path):
    make, prompt_of = SOURCES[request.param]
    model = make()
    model.config.save_pretrained(tmp_path)
    # tokens of times among it
    model.generation_config.save_pretrained(tmp_path)
    return tmp_path, prompt_of


@pytest.mark.parametrize(
    "sources",
    [pytest.param(name, marks=() if name in ("whisper", "t5") else pytest.mark.nightly) for name in SOURCES],
    indirect=True,
)
def test_a_step_waits_once_where_an_encoder_reads_the_prompt(sources, gpu):
    path, prompt_of = sources
    driver = started(path, max_num_batched_tokens=256)
    a_life(driver, prompt_of)
    # others: what was encoded is kept
    gpu.num_waits = 0
    gpu.work.is_strict = True
    num_steps = a_life(driver, lambda row: prompt_of(row + 10))
    assert gpu.num_waits == num_steps
    assert gpu.work.num_launches > 100


# models that take images, and prompts of which some tokens are those of one
IMAGES = (
    "gemma3", "gemma4", "gemma4_ahead", "internvl", "internvl_norms", "llava", "llava_siglip", "llava_next", "mistral3",
    "pixtral", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip


@pytest.fixture
def images(request, tmp_path):
    """Before anything is fake."""
    path = make_image_checkpoint(tmp_path, request.param)
    known = json.loads((path / "config.json").read_text())
    processor = ImageProcessor.find(path, known, tokenizer=Tokenizer.from_folder(path))
    prompts = []
    for row in range(2 * len(WAYS)):
        noise = np.random.default_rng(row).integers(0, 256, (60, 80, 3), dtype=np.uint8)
        tokens = [7 + row] * 5 + [IMAGE_TOKEN_ID] + [9] * (1 + row)
        tokens, media = processor.expand(tokens, [(Image.fromarray(noise), "image")], None)
        prompts.append((tokens, {"media": media}))
    return path, prompts


@pytest.mark.parametrize(
    "images",
    [pytest.param(name, marks=() if name == "qwen2_5_vl" else pytest.mark.nightly) for name in IMAGES],
    indirect=True,
)
def test_a_step_waits_once_where_rows_have_images(images, gpu):
    path, prompts = images
    driver = started(path, max_num_batched_tokens=512)
    a_life(driver, prompts.__getitem__)
    # others: what was encoded is kept
    gpu.num_waits = 0
    gpu.work.is_strict = True
    num_steps = a_life(driver, prompts[len(WAYS) :].__getitem__)
    assert gpu.num_waits == num_steps
    assert driver.worker.statistics()["num_images_encoded"] >= len(prompts)


@pytest.fixture
def adapters(tmp_path):
    """Before anything is fake: a checkpoint, and folders of adapters for it."""
    path = make_checkpoint(tmp_path / "model", "llama")
    return path, [make_adapter(tmp_path / f"adapter {seed}", path, seed=seed, rank=4) for seed in range(4)]


def test_a_step_waits_once_where_rows_have_adapters(adapters, gpu):
    path, folders = adapters
    driver = started(path, max_loras=2, max_cpu_loras=4, max_lora_rank=8)
    for number, folder in enumerate(folders, start=1):
        driver.worker.control("load_adapter", {"number": number, "path": str(folder)})
        while driver.worker.control("adapter_state", {"number": number})["state"] == "loading":
            driver.worker.control("await_adapter", {"number": number})
    a_life(driver, lambda row: ([7 + row] * (9 + row), {"adapter": row % 2 + 1}))
    # others, which take the slots of the first ones
    gpu.num_waits = 0
    gpu.work.is_strict = True
    num_steps = a_life(driver, lambda row: ([7 + row] * (9 + row), {"adapter": row % 2 + 3}))
    assert gpu.num_waits == num_steps
    assert driver.worker.statistics()["num_adapter_slot_fills_total"] == 4


@pytest.fixture
def drafts(request, tmp_path):
    """Before anything is fake: a checkpoint, and who proposes for it."""
    path = make_checkpoint(tmp_path / "target", "llama")
    draft = None
    if request.param == "eagle":
        draft = make_eagle_head(tmp_path / "head", path)
    elif request.param == "draft_model":
        draft = make_checkpoint(tmp_path / "draft", "qwen3", num_hidden_layers=1)
    model_path = None if draft is None else str(draft)
    return path, SpeculationConfig(method=request.param, num_speculative_tokens=3, model_path=model_path)


@pytest.mark.parametrize(("drafts", "waits"), [("ngram", 1), ("eagle", 2), ("draft_model", 2)], indirect=["drafts"])
def test_a_step_in_which_a_model_drafts_waits_twice(drafts, waits, gpu):
    """For tokens, and for what is proposed after them; n-grams are looked up by the host."""
    path, speculation = drafts
    driver = started(path, lookahead=3, speculation=speculation)

    def steps():
        for row, way in enumerate(WAYS):
            driver.admit(row, [0] * (9 + row), sampling=SamplingParams(max_tokens=60, **way))
        for _ in range(3):
            output = driver.step(num_drafts=3)
            assert not output.failures, output.failures
        assert max(driver.drafts.values()) > 0, "nothing was proposed"
        for row in range(len(WAYS)):
            driver.release(row)
        driver.step({})
        return 3

    steps()
    gpu.num_waits = 0
    gpu.work.is_strict = True
    num_steps = steps()
    assert gpu.num_waits == waits * num_steps


@pytest.mark.parametrize("config", ["llama"], indirect=True)
def test_whatever_is_asked_of_a_step_it_waits_once(config, gpu):
    driver = started(config)
    asked = (
        {"sampling": SamplingParams(temperature=0.0, prompt_logprobs=3)},
        {"sampling": SamplingParams(temperature=0.0, logprobs=1, logprob_token_ids=[4, 9])},
        {"sampling": SamplingParams(temperature=0.5, min_p=0.1, presence_penalty=0.5)},
        {"sampling": SamplingParams(temperature=0.5), "bad_words_token_ids": [[3], [7, 8]]},
        {"num_candidates": 4, "sampling": SamplingParams(temperature=0.0, repetition_penalty=1.1)},
        {"pooling": "last", "label_token_ids": [3, 5]},
        {
            "sampling": SamplingParams(temperature=0.0, thinking_token_budget=0),
            "thought_marks": ThoughtMarks(opening=20, closing=21, is_always_open=True),
        },
    )

    def step():
        for row, fields in enumerate(asked):
            driver.admit(row, [7 + row] * (3 + row), **fields)
        output = driver.step()
        assert not output.failures, output.failures
        for row in range(len(asked)):
            driver.release(row)
        driver.step({})
        return output

    step()
    gpu.num_waits = 0
    gpu.work.is_strict = True
    output = step()
    assert gpu.num_waits == 1
    assert (set(output.rows), set(output.candidates), set(output.vectors)) == ({0, 1, 2, 3, 6}, {4}, {5})


@pytest.mark.parametrize("config", SAMPLED, indirect=True)
def test_kernels_are_made_for_a_model_and_not_for_a_batch(config, gpu):
    """Numbers that are 1 or multiples of 16, and memory at such places, are what Triton compiles a kernel for once
    more: a step of a size that was not there before would wait for its compiler, and might have other bits."""
    driver = started(config, max_num_batched_tokens=256)

    def forms_of_steps(num_rows, length):
        gpu.work.specialised.clear()
        for row in range(num_rows):
            driver.admit(row, [7 + row] * length, sampling=SamplingParams(max_tokens=60, **WAYS[row % len(WAYS)]))
        for _ in range(3):
            output = driver.step()
            assert not output.failures, output.failures
        for row in range(num_rows):
            driver.release(row)
        driver.step({})
        return {made: set(forms) for made, forms in gpu.work.specialised.items()}

    known = forms_of_steps(5, 7)
    for num_rows, length in ((1, 1), (1, 16), (2, 5), (3, 17), (8, 16), (1, 200), (4, 40)):
        for made, forms in forms_of_steps(num_rows, length).items():
            before = known.setdefault(made, forms)
            assert forms <= before, (num_rows, length, made[0], _differences(forms - before, before))


def _differences(new, known):
    """The arguments in which forms of a kernel differ."""
    return [[a[0] for a, b in zip(one, other, strict=True) if a != b] for one in new for other in known]


@pytest.fixture
def encoder(request, tmp_path):
    if request.param == "llama":
        make_config(request.param).save_pretrained(tmp_path)
        return tmp_path
    return make_encoder(tmp_path / "model", request.param)


@pytest.mark.parametrize("encoder", [*ENCODERS, "llama"], indirect=True)
def test_a_step_of_vectors_waits_once(encoder, gpu):
    """For the vectors themselves."""
    driver = started(encoder)

    def step():
        for row, pooling in enumerate(("cls", "mean", "last")):
            driver.admit(row, [7 + row] * (3 + row), pooling=pooling)
        output = driver.step()
        assert not output.failures, output.failures
        assert len(output.vectors) == 3
        for row in range(3):
            driver.release(row)
        driver.step({})

    step()
    gpu.num_waits = 0
    gpu.work.is_strict = True
    step()
    assert gpu.num_waits == 1


def test_every_native_model_is_among_them():
    """But Kimi K2, which is DeepSeek V3 under another name and which Transformers has no configuration of."""
    text = {ARCHITECTURES[name][0] for name in NAMES}
    images = {JOINED[name][0] if name in JOINED else name.removesuffix("_ahead") for name in IMAGES}
    missing = set(native_model_types()) - text - images - SOURCES.keys() - set(ENCODERS)
    assert missing == {"kimi_k2"}
    assert native_class("kimi_k2", []) is native_class("deepseek_v3", [])


def test_what_waits_is_refused(gpu):
    from tests.support.fake_gpu import DEVICE, HostWaitError
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    gpu.work.is_strict = True
    numbers = torch.zeros(4, device=DEVICE)
    with pytest.raises(DataDependentOutputException):
        numbers[0].item()
    with pytest.raises(DynamicOutputShapeException):
        numbers.nonzero()
    with pytest.raises(HostWaitError, match="middle of a step"):
        numbers.cpu()
    with pytest.raises(HostWaitError, match="not pinned"):
        torch.ones(3).to(DEVICE)
    with pytest.raises(RuntimeError, match="device"):
        numbers + torch.ones(4)
