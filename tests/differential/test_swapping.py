"""Swapped blocks come back as they went (3.4.5): greedy tokens equal Transformers', wherever the swap space is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sampled import sampled
from transformers import AutoModelForCausalLM

from quire.engine_core.engine_core import EngineCore
from quire.messages import AbortRequests, EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.greedy import Reference, assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.tiny_checkpoints import VOCAB_SIZE, make_checkpoint

LENGTHS = [16, 63, 1, 40, 29, 52]
NUM_TOKENS = 32
SCARCE: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 16, "preemption_mode": "swap"}
# The longest prompt and its output need 95 tokens, all of them together 393.
NUM_SLOTS = 144
# by block size: hardly more than one request needs where a window of 24 passes
NUM_BLOCKS_WITH_WINDOW = {1: 48, 8: 7, 16: 5}


@dataclass
class Subject:
    """A checkpoint, prompts, and what Transformers says."""

    path: Path
    prompts: list[list[int]]
    references: list[Reference]
    has_window: bool

    def core(self, block_size: int = 8, **options: Any) -> EngineCore:
        num_blocks = NUM_BLOCKS_WITH_WINDOW[block_size] if self.has_window else NUM_SLOTS // block_size
        return real_core(
            self.path, **{**SCARCE, "block_size": block_size, "num_gpu_blocks_override": num_blocks, **options}
        )

    def check(self, core: EngineCore) -> dict[str, float]:
        """Runs all prompts twice; returns the statistics at the end."""
        watch = HostWatch(core)
        for _ in range(2):
            tokens = generate_greedy(core, self.prompts, NUM_TOKENS, watch)
            for ours, reference, length in zip(tokens, self.references, LENGTHS, strict=True):
                assert_same_tokens(ours, reference, f"prompt of {length}")
        statistics = core.statistics()
        assert statistics["num_blocks_held"] == statistics["host_slots_swapped"] == 0
        assert statistics["num_preemptions_total"] > 0, "the test asks for preemption"
        return statistics


class HostWatch:
    """After each step: host blocks are swapped or free, and never more than there are."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.most_swapped = 0

    def __call__(self) -> None:
        memory = self.core.scheduler.memory()
        slots = memory["num_host_blocks"] * memory["block_size"]
        assert memory["host_slots"]["swapped"] + memory["host_slots"]["free"] == slots
        assert 0 <= memory["host_slots"]["swapped"] <= slots
        assert sum(memory["slots"].values()) == memory["num_blocks"] * memory["block_size"]
        self.most_swapped = max(self.most_swapped, memory["host_slots"]["swapped"])


def make_subject(path: Path, architecture: str) -> Subject:
    make_checkpoint(path, architecture)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(21)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    references = [reference_generate(model, prompt, NUM_TOKENS) for prompt in prompts]
    return Subject(path, prompts, references, has_window=architecture == "mistral")


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(("block_size", "prefix_caching"), sampled([1, 8, 16], [True, False], n=3))
def test_tokens_equal_transformers(subject: Subject, block_size: int, prefix_caching: bool) -> None:
    core = subject.core(block_size, enable_prefix_caching=prefix_caching)
    statistics = subject.check(core)
    assert statistics["num_preemptions_by_swap_total"] > 0
    assert statistics["num_preemptions_by_recompute_total"] == statistics["recomputed_tokens_total"] == 0
    assert statistics["swapped_out_blocks_total"] > 0
    # with the prefix cache, some of them may still be on the device
    assert 0 < statistics["swapped_in_blocks_total"] <= statistics["swapped_out_blocks_total"] or prefix_caching
    core.shutdown()


def test_a_file_serves_as_swap_space(subject: Subject, tmp_path: Path) -> None:
    core = subject.core(swap_directory=str(tmp_path), enable_prefix_caching=False)
    statistics = subject.check(core)
    assert statistics["swapped_in_blocks_total"] > 0
    core.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_a_small_swap_space_is_never_exceeded(llama: Subject) -> None:
    """What does not fit is computed again."""
    core = llama.core(enable_prefix_caching=False)
    whole = core.control("memory", {})["num_host_blocks"]
    core.shutdown()
    assert whole == NUM_SLOTS // 8, "by default as much as the KV cache"
    layers, heads, size = 3, 2, 16
    block_bytes = 8 * layers * 2 * heads * size * 4
    core = llama.core(swap_space=6 * block_bytes / 2**30, enable_prefix_caching=False)
    assert core.control("memory", {})["num_host_blocks"] == 6
    statistics = llama.check(core)
    assert statistics["num_preemptions_by_swap_total"] > 0
    assert statistics["num_preemptions_by_recompute_total"] > 0
    core.shutdown()


@pytest.mark.parametrize("options", [{"preemption_mode": "recompute"}, {"preemption_mode": "auto", "swap_space": 0}])
def test_without_swap_space_everything_is_computed_again(llama: Subject, options: dict[str, Any]) -> None:
    core = llama.core(**options)
    assert core.control("memory", {})["num_host_blocks"] == 0
    statistics = llama.check(core)
    assert statistics["num_preemptions_by_swap_total"] == statistics["swapped_out_blocks_total"] == 0
    assert statistics["recomputed_tokens_total"] > 0
    core.shutdown()


def test_a_request_that_is_given_up_while_swapped_gives_its_host_blocks_back(llama: Subject) -> None:
    core = llama.core(enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(llama.prompts):
        core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
    while core.has_work and not core.statistics()["host_slots_swapped"]:
        core.step()
    assert core.statistics()["host_slots_swapped"] > 0
    core.abort(AbortRequests(request_ids=list(range(len(llama.prompts)))))
    while core.has_work:
        core.step()
    statistics = core.statistics()
    assert statistics["host_slots_swapped"] == statistics["num_blocks_held"] == 0
    llama.check(core)
    core.shutdown()
