"""Greedy float32 tokens equal Transformers', whatever is switched on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.sampled import sampled
from transformers import AutoModelForCausalLM

from quire.testing.greedy import Reference, assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.tiny_checkpoints import VOCAB_SIZE, make_checkpoint

NATIVE = [
    "llama",
    "llama_rope_llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "opt",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "gpt_oss",
    "lfm2",
    "qwen3_next",
    "qwen3_5_text",
    "mamba2",
    "granitemoehybrid",
    "granitemoehybrid_dense",
    "gemma3",
    "olmo3",
    "phi3",
    "ministral3",
    "phi",
]
MIXED = ["gemma4", "gemma4_moe"]
LATENT = ["deepseek_v2", "deepseek_v3_groups"]
CHUNKED = ["llama4"]
FALLBACK = ["gemma2", "stablelm"]
FAMILIES = NATIVE + LATENT + CHUNKED + MIXED + FALLBACK
LENGTHS = [1, 15, 16, 17, 63, 101]
NUM_TOKENS = 40
SETTINGS = {
    "blocks of 16": {"block_size": 16},
    "blocks of 8": {"block_size": 8},
    "budget of 48": {"block_size": 16, "max_num_batched_tokens": 48},
    "few sequences": {"block_size": 16, "max_num_seqs": 2},
    "reference attention": {"block_size": 16, "attention_backend": "reference"},
    "bursts": {"block_size": 16, "burst_time": 1.0},
}
Checkpoint = tuple[Path, list[list[int]], list[Reference]]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Each is made once."""

    @functools.cache
    def made(family: str) -> Checkpoint:
        path = make_checkpoint(tmp_path_factory.mktemp(family), family)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(11)
        prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
        return path, prompts, [reference_generate(model, prompt, NUM_TOKENS) for prompt in prompts]

    return made


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint_of(request.param)


def check(tokens: list[list[int]], references: list[Reference], what: str) -> None:
    for ours, reference, length in zip(tokens, references, LENGTHS, strict=True):
        assert_same_tokens(ours, reference, f"{what}, prompt of {length}")


@pytest.mark.parametrize(
    ("setting", "checkpoint"),
    sampled(SETTINGS, FAMILIES, n=48),
    indirect=["checkpoint"],
)
def test_tokens_equal_transformers(checkpoint: Checkpoint, setting: str) -> None:
    path, prompts, references = checkpoint
    core = real_core(path, kv_cache_memory_bytes=2**23, **SETTINGS[setting])
    check(generate_greedy(core, prompts, NUM_TOKENS), references, setting)
    assert core.statistics()["num_blocks_held"] == 0
    core.shutdown()


def test_tokens_equal_transformers_with_a_warm_prefix_cache(checkpoint: Checkpoint) -> None:
    path, prompts, references = checkpoint
    core = real_core(path, kv_cache_memory_bytes=2**23, block_size=8)
    generate_greedy(core, prompts, NUM_TOKENS)
    assert core.statistics()["num_prefix_hit_tokens_total"] == 0
    check(generate_greedy(core, prompts, NUM_TOKENS), references, "warm")
    assert core.statistics()["num_prefix_hit_tokens_total"] > 100
    core.shutdown()


@pytest.mark.parametrize(
    ("prefix_caching", "checkpoint"),
    sampled([False, True], FAMILIES, n=len(FAMILIES)),
    indirect=["checkpoint"],
)
def test_tokens_equal_transformers_with_preemption(checkpoint: Checkpoint, prefix_caching: bool) -> None:
    path, prompts, references = checkpoint
    # Windows free blocks, so it takes fewer of them to run short; some have three groups of layers.
    name = path.name[:-1]  # pytest numbers its folders
    num_blocks = {
        "mistral": 13,
        "gemma2": 42,
        "gemma3": 42,
        "olmo3": 42,
        "qwen3_next": 32,
        "qwen3_5_text": 32,
        "granitemoehybrid": 40,
        "granitemoehybrid_dense": 40,
        "qwen2_moe": 42,
        "gpt_oss": 42,
        "llama4": 42,
        "gemma4": 32,
        "gemma4_moe": 42,
    }.get(name, 24)
    core = real_core(
        path,
        block_size=8,
        num_gpu_blocks_override=num_blocks,
        max_model_len=160,
        max_num_batched_tokens=48,
        enable_prefix_caching=prefix_caching,
    )
    check(generate_greedy(core, prompts, NUM_TOKENS), references, "preempted")
    # a state never grows
    assert name == "mamba2" or core.statistics()["num_preemptions_total"] > 0, "the test asks for preemption"
    assert core.statistics()["num_blocks_held"] == 0
    core.shutdown()
