"""Keys and values in another type than the model: what it costs in accuracy, and that all else stays as it is."""

import json

import pytest
import torch
from tests.support.worker_driver import WorkerDriver
from torch import nn

from quire import LLM, SamplingParams
from quire.config import EngineOptions, resolve
from quire.config.arithmetic import ModelShape
from quire.config.model_source import embedded_path
from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.errors import ModelError, OptionError
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.attention import Attention, bind_backend
from quire.worker.attention.reference import ReferenceBackend
from quire.worker.model_loader import load_model
from quire.worker.worker import Worker

# Mean Kullback-Leibler divergence from a float32 cache, in nats, over the text below.
KL_BOUND = {"bfloat16": 2e-4, "float16": 2e-6, "int8": 1e-3, "fp8": 3e-2}
TEXT = list(range(40, 104)) + [3, 77, 5] * 30  # no language: the model is unsure of every token
PROMPTS = {0: [5, 6, 7, 8, 9, 10, 11], 3: [200, 3, 77], 6: list(range(40, 75))}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen2_window", "qwen2_window")


def logits(**options):
    model = load_model(worker_config(embedded_path(), **options))
    return ModelHarness(model, block_size=4).run(0, TEXT, chunk_size=50).log_softmax(-1)


@pytest.fixture(scope="module")
def expected_logits():
    return logits()


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("kind", KL_BOUND)
def test_accuracy(expected_logits, kind, backend):
    found = logits(kv_cache_dtype=kind, attention_backend=backend)
    kl = (expected_logits.exp() * (expected_logits - found)).sum(-1).mean()
    assert 0 < kl < KL_BOUND[kind]


def started(checkpoint, **options):
    worker = Worker(worker_config(checkpoint, **options))
    worker.load()
    groups, _ = make_groups(worker.measure_capacity().layers)
    worker.initialize_cache([list(group.layer_names) for group in groups], 200, 100)
    return WorkerDriver(worker, block_size=4, num_blocks=200, num_host_blocks=100, num_groups=len(groups), seed=1)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "fp8"])
def test_blocks_that_move_take_their_scales_along(checkpoint, kind, backend):
    plain = started(checkpoint, kv_cache_dtype=kind, attention_backend=backend)
    for row, prompt in PROMPTS.items():
        plain.admit(row, prompt)
    plain.generate(20)

    driver = started(checkpoint, kv_cache_dtype=kind, attention_backend=backend)
    for row, prompt in PROMPTS.items():
        driver.admit(row, prompt)
    driver.generate(4)
    driver.swap_out(6)
    driver.step({0: 1, 3: 1})
    driver.swap_out(0)
    driver.generate(2)
    driver.swap_in(6)
    driver.swap_in(0)
    driver.step({})
    driver.fork(6, 1, len(driver.tokens[6]) - 1)
    driver.generate(8)
    for row in (*PROMPTS, 1):
        found = driver.tokens[row]
        assert found == plain.tokens[6 if row == 1 else row][: len(found)]


def test_the_layers_say_what_they_keep():
    layer = Attention(4, 2, 8, 1.0, name="attn", value_dim=12)
    model = nn.ModuleList([layer])
    assert layer.spec.bytes_per_token == 2 * (8 + 12) * 4
    for kind, num_bytes in (("bfloat16", 2 * 20 * 2), ("int8", 2 * (20 + 8)), ("fp8", 2 * (20 + 8))):
        bind_backend(model, "auto", 4, "cpu", kind)
        assert layer.spec.bytes_per_token == num_bytes
    with pytest.raises(ValueError, match=r"is not \[\*, 2, \*, 12\]"):
        layer.bind(0, torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 12))
    with pytest.raises(ValueError, match=r"cache of torch.float32, not torch.float8_e4m3fn"):
        layer.bind(0, torch.zeros(3, 2, 4, 12), torch.zeros(3, 2, 4, 16))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "fp8"])
def test_latent_layers_keep_what_the_plan_says(kind, tmp_path):
    """One row a token and layer: the latent vector and the rotary part. The engine takes just so many bytes."""
    path = make_checkpoint(tmp_path, "deepseek_v2")
    worker = Worker(worker_config(path, kv_cache_dtype=kind))
    worker.load()
    groups, bytes_per_token = make_groups(worker.measure_capacity().layers)
    config = json.loads((path / "config.json").read_text())
    assert bytes_per_token == ModelShape.of(config).kv_bytes_per_token(kind)
    assert bytes_per_token == 3 * (
        48 * {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}[kind] + 4 * (kind in "int8 fp8")
    )
    worker.initialize_cache([list(group.layer_names) for group in groups], 50, 0)
    assert worker.statistics()["kv_cache_bytes"] == 50 * 4 * bytes_per_token


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("kind", KL_BOUND)
def test_accuracy_of_latent_layers(kind, backend, tmp_path):
    path = make_checkpoint(tmp_path, "deepseek_v3")

    def found(**options):
        model = load_model(worker_config(path, attention_backend=backend, **options))
        return ModelHarness(model, block_size=4).run(0, TEXT, chunk_size=50)

    exact = found()
    error = (found(kv_cache_dtype=kind) - exact).square().mean().sqrt() / exact.std()
    assert 0 < error < {"bfloat16": 0.03, "float16": 0.004, "int8": 0.06, "fp8": 0.3}[kind]


def test_what_cannot_keep_codes_says_so(monkeypatch):
    odd = nn.ModuleList([Attention(4, 2, 6, 1.0, name="odd")])
    with pytest.raises(ModelError, match="multiples of 4, not 6 and 6"):
        bind_backend(odd, "reference", 4, "cpu", "int8")
    # A backend from elsewhere that knows nothing of it.
    monkeypatch.setattr(ReferenceBackend, "cache_dtypes", ())
    model = nn.ModuleList([Attention(4, 2, 8, 1.0, name="attn")])
    with pytest.raises(ModelError, match=r"the model's type alone \(torch.float32\), not as torch.int8"):
        bind_backend(model, "reference", 4, "cpu", "int8")
    assert bind_backend(model, "reference", 4, "cpu", "float32").name == "reference"


@pytest.mark.parametrize(
    ("asked", "chosen", "reason"),
    [
        ("auto", "bfloat16", "the type of the model"),
        ("fp8_e4m3", "fp8", "as asked"),
        ("float32", "float32", "as asked"),
    ],
)
def test_the_option(asked, chosen, reason):
    config, reasons = resolve(EngineOptions(dtype="bfloat16", kv_cache_dtype=asked))
    assert config.worker.kv_cache_dtype == chosen
    assert ("kv_cache_dtype", chosen, reason) in reasons.rows


def test_an_unknown_type_is_an_error():
    with pytest.raises(OptionError, match="kv_cache_dtype"):
        resolve(EngineOptions(kv_cache_dtype="fp8_e5m2"))


def test_answers_and_sizes():
    """The embedded model keeps its answers, and four times as many tokens fit into the same memory."""
    greedy, chat = SamplingParams(temperature=0.0, max_tokens=16), [{"role": "user", "content": "What is 3 + 4?"}]
    answers, num_blocks = {}, {}
    for kind in ("float32", "int8", "fp8"):
        options = {"dtype": "float32", "kv_cache_dtype": kind, "kv_cache_memory_bytes": 1 << 20, "max_model_len": 64}
        with LLM(**options, check_invariants=True, device="cpu") as llm:
            answers[kind] = [llm.chat(chat, greedy, use_tqdm=False)[0].outputs[0].text for _ in range(2)]
            num_blocks[kind] = llm.statistics()["num_blocks"]
    assert answers["int8"] == answers["fp8"] == answers["float32"]
    assert num_blocks["int8"] == num_blocks["fp8"] > 3.5 * num_blocks["float32"]
