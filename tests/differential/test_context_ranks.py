"""Workers that share the keys and values of each sequence give the tokens of one."""

import pytest
import torch
from tests.support.rank_runs import NUM_TOKENS, make_draft, prompts, ways
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.engine_core.launch import SpeculationCosts
from quire.testing.greedy import assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.tiny_checkpoints import make_checkpoint

# in the default run, a way each; the others by night
SAMPLE = {
    "chunks": "llama",
    "preempted": "gpt_oss",
    "swapped": "deepseek_v3_groups",
    "ahead": "qwen3_next",
    "drafts": "llama4",
}
OTHERS = [
    "mistral", "qwen2", "qwen3", "opt", "gpt2", "mixtral", "qwen3_moe", "deepseek_v2", "lfm2", "qwen3_5_text",
    "mamba2", "granitemoehybrid", "gemma3", "gemma4",
]  # fmt: skip
WAYS = ways(30)
# those with several block tables, or states, need more for one request
MORE_BLOCKS = {
    "qwen3_next": 160, "granitemoehybrid": 160, "qwen3_5_text": 160, "lfm2": 80, "gpt_oss": 80, "llama4": 80,
    "gemma3": 80, "gemma4": 80,
}  # fmt: skip


def generate(path, **options):
    """(tokens of each prompt, statistics)"""
    core = real_core(path, **{"context_parallel_size": 2, "kv_cache_memory_bytes": 16 << 20, **options})
    try:
        return generate_greedy(core, prompts(), NUM_TOKENS), core.statistics()
    finally:
        core.shutdown()


def check(tmp_path, family, *, is_preempted=False, **options):
    path = make_checkpoint(tmp_path, family)
    if "num_gpu_blocks_override" in options:
        options["num_gpu_blocks_override"] = MORE_BLOCKS.get(family, options["num_gpu_blocks_override"])
    found, statistics = generate(path, **options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for ours, prompt in zip(found, prompts(), strict=True):
        assert_same_tokens(ours, reference_generate(model, prompt, NUM_TOKENS), f"{family}, {options}")
    assert statistics["num_preemptions_total"] > 0 or not is_preempted


@pytest.mark.parametrize(("way", "family"), SAMPLE.items(), ids=str)
def test_tokens_are_those_of_transformers(tmp_path, family, way):
    check(tmp_path, family, is_preempted="preemption_mode" in WAYS[way], **WAYS[way])


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [*SAMPLE.values(), *OTHERS])
def test_tokens_of_every_family_in_every_way(tmp_path, family, way):
    check(tmp_path, family, **WAYS[way])


# what drafts, for which target; each in one way
DRAFTS = {"twin": ("llama", "swapped"), "eagle3": ("llama", "chunks")}
BY_NIGHT = {"small": ("gpt_oss", "preempted"), "eagle": ("llama", "ahead"), "windowed": ("qwen2_window", "chunks")}


@pytest.mark.parametrize(
    ("kind", "family", "way"),
    [
        *((kind, *rest) for kind, rest in DRAFTS.items()),
        *(pytest.param(kind, *rest, marks=pytest.mark.nightly) for kind, rest in BY_NIGHT.items()),
    ],
)
def test_a_model_that_drafts_shares_what_it_keeps_of_a_sequence(tmp_path, monkeypatch, kind, family, way):
    # a step costs a second, a draft nothing: every row gets as many as it may have
    monkeypatch.setattr("quire.engine_core.launch.SpeculationCosts", lambda **_: SpeculationCosts())
    target = make_checkpoint(tmp_path / "target", family)
    drafting = {"speculative_config": make_draft(tmp_path / "draft", kind, target)}
    options = {**WAYS[way], "kv_cache_memory_bytes": 16 << 20}
    if "num_gpu_blocks_override" in options:
        options["num_gpu_blocks_override"] = 80
    # no draft changes a token; the drafts themselves are those of one worker, so as many are right
    (found, shared), (expected, alone) = (
        generate(target, context_parallel_size=size, **drafting, **options) for size in (2, 1)
    )
    assert found == expected == generate(target, context_parallel_size=1)[0]
    for name in ("num_draft_tokens_total", "num_accepted_draft_tokens_total"):
        assert shared[name] == alone[name]
    assert shared["num_draft_tokens_total"] > 50
    assert shared["num_accepted_draft_tokens_total"] > 0 or kind != "twin"


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.nightly
def test_beside_other_ways_of_sharing(tmp_path, options):
    check(tmp_path, "llama", **options)


@pytest.mark.nightly
def test_a_block_that_is_shared_by_samples_is_copied_by_each_rank(tmp_path):
    path = make_checkpoint(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    llm = LLM(model=str(path), dtype="float32", context_parallel_size=2, kv_cache_memory_bytes=16 << 20, block_size=8)
    sampling = SamplingParams(n=3, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], sampling)
    for output, prompt in zip(outputs, prompts(), strict=True):
        assert len(output.outputs) == 3
        expected = reference_generate(model, prompt, NUM_TOKENS)
        for sample in output.outputs:
            assert_same_tokens(list(sample.token_ids), expected, f"{len(prompt)} tokens, sample {sample.index}")


@pytest.mark.nightly
def test_four_share_a_block(tmp_path):
    check(tmp_path, "gpt_oss", context_parallel_size=4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "kept_as", "num_tokens"),
    # the kernel rounds weights of codes on the way, by the greatest weight that it has seen
    [("reference", "int8", NUM_TOKENS), ("reference", "fp8", NUM_TOKENS), ("cpu", "bfloat16", NUM_TOKENS),
     ("cpu", "int8", 4), ("cpu", "fp8", 4)],
)  # fmt: skip
def test_keys_and_values_that_are_kept_as_something_else(tmp_path, backend, kept_as, num_tokens):
    path = make_checkpoint(tmp_path, "llama")
    options = {"kv_cache_dtype": kept_as, "attention_backend": backend}
    found, expected = (generate(path, context_parallel_size=size, **options)[0] for size in (2, 1))
    assert [tokens[:num_tokens] for tokens in found] == [tokens[:num_tokens] for tokens in expected]


def test_a_worker_keeps_its_share_of_the_keys_and_values(tmp_path):
    path = make_checkpoint(tmp_path, "llama")
    alone, shared = (real_core(path, context_parallel_size=size, num_gpu_blocks_override=64) for size in (1, 2))
    try:
        bytes_alone, bytes_shared = (
            core.executor.control("statistics", {})["kv_cache_bytes"] for core in (alone, shared)
        )
        assert bytes_alone == 2 * bytes_shared > 0
    finally:
        alone.shutdown()
        shared.shutdown()


def test_the_same_memory_holds_as_many_times_the_tokens(tmp_path):
    path = make_checkpoint(tmp_path, "llama")
    found = []
    for size in (1, 2):
        core = real_core(path, context_parallel_size=size, kv_cache_memory_bytes=1 << 20)
        found.append(core.statistics()["num_blocks"])
        core.shutdown()
    assert found[1] == 2 * found[0] > 0
