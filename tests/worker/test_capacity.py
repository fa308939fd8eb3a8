"""How much memory is left for the KV cache."""

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from quire.config import EngineOptions, SpeculationConfig, resolve
from quire.config.image_sizes import ImageSizes
from quire.testing.fake_model import FakeModel
from quire.testing.image_checkpoints import make_image_checkpoint
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker import capacity as capacity_module
from quire.worker.attention import attention_layers
from quire.worker.capacity import StepCost, capacity, measure_largest_step, with_draft, with_encoder
from quire.worker.forward_context import forward_context, profiling_context
from quire.worker.live_tensors import LiveTensors
from quire.worker.model_loader import load_model
from quire.worker.platforms import MemoryReport, PeakMemory, current_platform
from quire.worker.sampler.choose import DrawSettings, choose_tokens, rows_in_slice
from quire.worker.sampler.logprobs import SampledLogprobs
from quire.worker.worker import Worker

GIB = 2**30


def test_the_arithmetic_stands_in_the_explanation():
    memory = MemoryReport(total_bytes=16 * GIB, free_bytes=13 * GIB, limit="the container's memory limit")
    found = capacity(FakeModel.random(8), memory, StepCost(GIB // 2, "as run", 0.01), 0.75, 5 * GIB)

    assert found.available_bytes == 12 * GIB - 3 * GIB - GIB // 2
    assert (found.host_bytes, found.seconds_per_token) == (5 * GIB, 0.01)
    assert found.layers == []
    assert found.explanation == (
        "16.00 GiB is the container's memory limit; 75% of it may be used: 12.00 GiB. "
        "In use now, weights included: 3.00 GiB. Largest step: 0.50 GiB (as run). Left for the KV cache: 8.50 GiB."
    )


@pytest.mark.parametrize(
    ("free", "own", "num_sharing", "left"),
    [
        # its share of all there is
        (20, 2, 1, 0.9 * 24 - 2),
        # others have 15 GiB, which is more than the tenth that is theirs: what they leave is not refused
        (8, 1, 1, 8),
        # several ranks: each has its own part, and of what is free an equal one
        (16, 2, 2, 8),
        (21, 1, 2, 0.9 * 24 / 2 - 1),
    ],
)
def test_an_engine_may_use_its_share_or_what_others_leave(free, own, num_sharing, left):
    memory = MemoryReport(24 * GIB, free * GIB, "the machine's memory", own * GIB)
    found = capacity(FakeModel.random(8), memory, StepCost(GIB // 4, "as run"), 0.9, 0, num_sharing=num_sharing)
    assert found.available_bytes == pytest.approx(left * GIB - GIB // 4, abs=2)
    assert found.free_bytes == free * GIB // num_sharing
    assert ("others leave" in found.explanation) == (left * num_sharing == free)


def test_what_adapters_may_come_to_take_is_no_room_for_the_cache(tmp_path):
    options = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8}
    path = make_checkpoint(tmp_path / "llama", "llama")
    config = resolve(EngineOptions(model=str(path), device="cpu", dtype="float32", **options))[0].worker
    worker = Worker(config)
    worker.load()
    memory = MemoryReport(total_bytes=16 * GIB, free_bytes=13 * GIB, limit="the machine's memory")
    worker._platform.memory = lambda: memory
    with_adapters = worker.measure_capacity()
    most = sum(worker._adapters.most_bytes(3))
    worker._adapters = None
    without = worker.measure_capacity()
    assert without.available_bytes - with_adapters.available_bytes == most
    assert "Set aside for adapters (max_loras, max_cpu_loras): 0.00 GiB." in with_adapters.explanation
    assert "adapters" not in without.explanation


def test_nothing_is_left():
    memory = MemoryReport(total_bytes=4 * GIB, free_bytes=GIB, limit="the machine's memory")
    found = capacity(FakeModel.random(8), memory, StepCost(GIB, "as run"), 0.9)

    assert found.available_bytes == 0
    assert "Left for the KV cache: 0.00 GiB." in found.explanation


class CountingPlatform:
    """Its memory is a number per token or row, so that the result can be computed."""

    device = torch.device("cpu")

    def __init__(self, model):
        self.model = model
        self.measured = []

    @contextmanager
    def measure_peak(self):
        peak, before = PeakMemory(), len(self.model.sizes)
        yield peak
        # what draws does not ask the model
        (size,) = self.model.sizes[before:] or [0]
        self.measured.append(size)
        peak.peak_bytes = size * 1000

    def synchronize(self):
        pass


class RecordingModel(FakeModel):
    def __init__(self, table):
        super().__init__(table)
        self.sizes = []

    def forward(self, input_ids, positions):
        self.sizes.append(len(input_ids))
        return super().forward(input_ids, positions)

    def compute_logits(self, hidden):
        self.sizes.append(len(hidden))
        return super().compute_logits(hidden)


@pytest.fixture
def model():
    return RecordingModel(FakeModel.random(100).table_PV)


def test_a_gpu_runs_the_largest_step_in_full(model, monkeypatch):
    platform = CountingPlatform(model)
    monkeypatch.setattr(capacity_module, "_runs_in_full", lambda platform: True)
    step = measure_largest_step(model, platform, worker_config("none", max_num_batched_tokens=512, max_num_seqs=64))

    assert platform.measured == [512, 64, 0]
    assert step.num_bytes == 512 * 1000
    assert step.description == "512 tokens, 64 sampling; measured with 512 and 64"
    # the first run of one token is not timed: kernels are compiled in it
    assert model.sizes == [512, 512, 64] + [1] * 9


class SlowModel(RecordingModel):
    """Takes its time on a clock of its own: so much for each token, and a warm-up in the first run."""

    def __init__(self, seconds_per_token, warm_up):
        super().__init__(FakeModel.random(100).table_PV)
        self.seconds_per_token, self.warm_up, self.now = seconds_per_token, warm_up, 0.0

    def perf_counter(self):
        return self.now

    def forward(self, input_ids, positions):
        self.now += self.seconds_per_token * len(input_ids) + self.warm_up
        self.warm_up = 0.0
        return super().forward(input_ids, positions)


@pytest.mark.parametrize(
    "seconds_per_token, warm_up, most, timed",
    [
        (0.01, 0.2, 1600, 16),
        (0.000_1, 0.0004, 1600, 256),
        (0.000_1, 0.0004, 100, 100),
        (0.000_1, 0.0104, 1600, 64),
    ],
)
def test_the_time_of_a_token_is_that_of_a_second_run(monkeypatch, seconds_per_token, warm_up, most, timed):
    model = SlowModel(seconds_per_token, warm_up)
    monkeypatch.setattr(capacity_module, "time", model)
    config = worker_config("none", max_num_batched_tokens=most, max_num_seqs=4)
    step = measure_largest_step(model, current_platform("cpu"), config)

    assert model.sizes[:2] == [16, timed]
    assert step.seconds_per_token == pytest.approx(seconds_per_token)


def test_a_long_first_run_is_not_repeated(monkeypatch):
    model = SlowModel(0.1, 0.08)
    monkeypatch.setattr(capacity_module, "time", model)
    config = worker_config("none", max_num_batched_tokens=1600, max_num_seqs=4)
    step = measure_largest_step(model, current_platform("cpu"), config)

    assert model.sizes == [16, 4, 1]
    assert step.seconds_per_token == pytest.approx(0.1 + 0.08 / 16)
    assert step.seconds_per_step == pytest.approx(0.1)


class CompilingModel(SlowModel):
    """Has to be compiled for each number of tokens."""

    def forward(self, input_ids, positions):
        self.warm_up = 0.0 if len(input_ids) in self.sizes else 2.0
        return super().forward(input_ids, positions)


def test_what_a_gpu_compiles_at_first_is_no_part_of_a_step(monkeypatch):
    """By the length of a step it is decided how prompts are cut, and whether steps are decided ahead."""
    model = CompilingModel(0.001, 0.0)
    monkeypatch.setattr(capacity_module, "time", model)
    monkeypatch.setattr(capacity_module, "_runs_in_full", lambda platform: True)
    config = worker_config("none", max_num_batched_tokens=64, max_num_seqs=4)
    step = measure_largest_step(model, CountingPlatform(model), config)

    assert step.seconds_per_token == pytest.approx(0.001)
    assert step.seconds_per_step == pytest.approx(0.001)


def test_a_long_first_run_over_weights_in_a_file_is_repeated(monkeypatch):
    """It read them from a disk, perhaps, and its time is kept for later starts."""
    model = SlowModel(0.1, 8.0)
    model.num_mapped_bytes = 1 << 30
    monkeypatch.setattr(capacity_module, "time", model)
    config = worker_config("none", max_num_batched_tokens=1600, max_num_seqs=4)
    step = measure_largest_step(model, current_platform("cpu"), config)

    assert model.sizes[:2] == [16, 16]
    assert step.seconds_per_token == pytest.approx(0.1)


class SlowAttention:
    """A backend that takes its time on a clock of its own: so much for each pair of a token and one that it sees."""

    def __init__(self, seconds_per_pair):
        self.seconds_per_pair, self.now = seconds_per_pair, 0.0
        self.windows = []

    def perf_counter(self):
        return self.now

    def build_metadata(self, batch):
        return batch

    def forward(self, layer, query_THD, key_TKD, value_TKE, batch, out_THE):
        last = int(batch.seq_lens_S[0])
        self.now += self.seconds_per_pair * sum(range(last - len(query_THD) + 1, last + 1))
        self.windows.append(layer.sliding_window)


@pytest.mark.parametrize(
    ("name", "window", "num_reads"),
    # of gemma4 three layers keep keys; those of the one without a window are read by a later layer, too
    [("llama", 0, 3), ("gemma2", 0, 3), ("mistral", 24, 3), ("gemma4", 0, 3 * 2)],
)
def test_the_time_of_attention_is_that_of_a_layer_that_sees_all(tmp_path, monkeypatch, name, window, num_reads):
    config = worker_config(make_checkpoint(tmp_path / name, name), max_model_len=300)
    model = load_model(config)
    slow = SlowAttention(0.002)
    layers = attention_layers(model).values()
    for layer in layers:
        layer.backend = slow
    monkeypatch.setattr(capacity_module, "time", slow)
    tokens = torch.zeros(4, dtype=torch.int64)
    with capacity_module._counted_reads(model) as reads, forward_context(profiling_context()):
        model(tokens, torch.arange(4))
    clock = capacity_module._StepClock(model, current_platform("cpu"), float)
    seconds = capacity_module._seconds_per_pair(model, reads, 12, clock, config)
    assert seconds == pytest.approx(0.002 * num_reads)
    assert set(slow.windows) == {window}
    assert all(layer.k_cache is None for layer in layers)


def test_no_more_rows_than_tokens_can_sample(model):
    step = measure_largest_step(
        model, current_platform("cpu"), worker_config("none", max_num_batched_tokens=8, max_num_seqs=64)
    )

    assert model.sizes[:3] == [8, 8, 8]
    assert "8 tokens, 8 sampling" in step.description


def test_a_row_is_asked_once_more_for_each_draft(model):
    speculation = SpeculationConfig(method="ngram", num_speculative_tokens=3)
    config = worker_config("none", max_num_batched_tokens=14, max_num_seqs=3, speculation=speculation)
    step = measure_largest_step(model, current_platform("cpu"), config)

    assert "14 tokens, 12 sampling" in step.description


def test_a_draft_runs_after_the_target_while_hidden_states_stay():
    target, draft = StepCost(1000, "as run", 2.0, hidden_bytes=300), StepCost(600, "of the draft", 0.5)
    larger = StepCost(900, "of the draft", 0.5)

    assert with_draft(target, None) == target
    assert with_draft(target, draft).num_bytes == 1000
    assert with_draft(target, larger).num_bytes == 1200
    assert with_draft(target, draft).seconds_per_token == 2.5
    dearer = dataclasses.replace(draft, seconds_per_pair=0.25)
    assert with_draft(target, dearer).seconds_per_pair == 0.25


def test_a_cpu_runs_a_part_and_scales_what_lives():
    model = RecordingModel(FakeModel.random(4096, num_rows=3).table_PV)
    config = worker_config("none", max_num_batched_tokens=1600, max_num_seqs=64)
    step = measure_largest_step(model, current_platform("cpu"), config)

    # The second run is timed: larger where the first was quick.
    assert [model.sizes[0], model.sizes[2]] == [16, 16]
    assert 16 <= model.sizes[1] <= 256
    assert "scaled" in step.description
    # The worst moment is in the sampler: logits of all rows twice, for draws and log-probabilities, and the slice.
    row_bytes = 4 * 4096
    assert 2 * row_bytes < step.num_bytes / 64 / 1.25 < 10 * row_bytes


def test_a_sampler_under_load_needs_no_more_than_was_measured():
    """Rows that draw with top_p and want log-probabilities, more of them than fit into a slice, and copies of a slice,
    which processors change."""
    table, num_rows = FakeModel.random(4096, num_rows=3), 600
    config = worker_config("none", max_num_batched_tokens=num_rows, max_num_seqs=num_rows)
    platform = current_platform("cpu")
    assert rows_in_slice(4096, platform.device) < num_rows
    step = measure_largest_step(table, platform, config)

    settings = DrawSettings(
        temperature=np.ones(num_rows, dtype=np.float32),
        top_k=np.full(num_rows, 2**31),
        top_p=np.full(num_rows, 0.5),
        min_p=np.zeros(num_rows, dtype=np.float32),
        uniform=np.full(num_rows, 0.5),
    )
    hidden = table(torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int64))
    with torch.inference_mode(), LiveTensors() as live:
        logits = table.compute_logits(hidden).float()
        logprobs = SampledLogprobs(np.full(num_rows, 20), 4096, platform.device)
        copies = torch.empty(rows_in_slice(4096, platform.device), 4096)
        tokens, _ = choose_tokens(logits, settings)
        logprobs.read(logits, tokens)
        del copies
    assert live.peak_bytes < step.num_bytes
    # the slices are not multiplied by the number of rows
    assert step.num_bytes < 2 * live.peak_bytes


@pytest.mark.parametrize("vocab_size", [4096, 1 << 17])
def test_what_a_slice_needs_is_bounded(vocab_size):
    """On a CPU a slice has 2^21 logits, on a GPU 2^24: 40 bytes for each, whatever the number of rows."""
    found = capacity_module._slice_bytes(vocab_size, 1000, current_platform("cpu"))

    assert 4 << 20 < found < 64 << 20
    assert rows_in_slice(vocab_size, torch.device("meta")) * vocab_size == 1 << 24


def test_live_tensors_are_counted_while_they_live():
    with torch.inference_mode(), LiveTensors() as live:
        first = torch.empty(1000)
        second = first + 1
        second.add_(1)
        view = second.view(10, 100)
        del first
        third = torch.zeros(500)
        del second, view, third
        torch.zeros(100)

    assert live.peak_bytes == 8000


def test_a_real_model_before_it_has_a_cache(tmp_path):
    worker = Worker(worker_config(make_checkpoint(tmp_path / "llama", "llama")))
    worker.load()
    found = worker.measure_capacity()

    assert [(layer.num_kv_heads, layer.key_dim) for layer in found.layers] == [(2, 16)] * 3
    assert found.available_bytes > 0
    assert 0 < found.seconds_per_token < 1
    assert 0 < found.seconds_per_pair < 0.01
    memory = current_platform("cpu").memory()
    assert memory.free_bytes / 8 < found.host_bytes < memory.total_bytes / 4


@pytest.mark.parametrize(
    "model_type", ["qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4", "qwen2_5_vl", "qwen2_vl", "mistral3"]
)
def test_the_largest_image_has_its_memory_and_so_has_what_is_kept_of_images(tmp_path, model_type):
    path = make_image_checkpoint(tmp_path / model_type, model_type)
    config = resolve(EngineOptions(model=str(path), encoder_cache_bytes=GIB // 2))[0].worker
    largest = config.largest_image
    model = load_model(config)
    cost = with_encoder(StepCost(1000, "as run"), model, current_platform("cpu"), config)

    grid = [1, largest.rows * largest.merge_size, largest.columns * largest.merge_size]
    with torch.inference_mode(), LiveTensors() as live:
        model.encode_image(torch.zeros(grid[1] * grid[2], largest.patch_values), grid)
    assert live.peak_bytes <= cost.num_bytes - GIB // 2 <= 1.3 * live.peak_bytes
    assert f"an image of {largest.rows * largest.columns} tokens" in cost.description
    assert cost.description.endswith("and 0.50 GiB for what was encoded")


def test_a_model_without_images_needs_nothing_for_them():
    step = StepCost(1000, "as run")
    assert with_encoder(step, FakeModel.random(8), current_platform("cpu"), worker_config("none")) is step


@pytest.mark.parametrize(("max_pixels", "max_tokens", "expected"), [(28 * 28 * 50, 100, 7 * 8), (28 * 28 * 50, 9, 9)])
def test_the_largest_image_has_room_in_a_prompt(max_pixels, max_tokens, expected):
    largest = ImageSizes(max_pixels=max_pixels).largest(max_tokens)
    assert largest.rows * largest.columns == expected
    assert (largest.merge_size, largest.patch_values) == (2, 3 * 2 * 14 * 14)
