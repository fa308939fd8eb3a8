"""Whole steps of every native model on a GPU that is not there: nothing waits for the device but the end of a step."""

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tests.support.worker_driver import WorkerDriver

from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.messages import Media
from quire.sampling_params import SamplingParams
from quire.state_layout import state_layout
from quire.testing.model_harness import worker_config
from quire.testing.source_checkpoints import make_source_model
from quire.testing.speech_checkpoints import EN, NUM_SOURCES, START, TRANSCRIBE, make_speech_model
from quire.testing.tiny_checkpoints import ARCHITECTURES, make_config
from quire.testing.tiny_encoders import ENCODERS, make_encoder
from quire.worker.models.registry import native_model_types
from quire.worker.worker import Worker

NUM_BLOCKS = 1000
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


def started(path, **options):
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
    make().config.save_pretrained(tmp_path)
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
    """But those that take images, whose text models are."""
    text = {ARCHITECTURES[name][0] for name in NAMES}
    missing = set(native_model_types()) - text - SOURCES.keys() - set(ENCODERS)
    assert missing <= {
        "gemma3", "gemma4", "internvl", "kimi_k2", "llava", "llava_next", "mistral3", "qwen2_5_vl", "qwen3_vl",
        "qwen3_vl_moe",
    }  # fmt: skip


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
