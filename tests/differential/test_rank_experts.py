"""Workers that keep whole experts give the tokens of one."""

import pytest
import torch
from tests.support.gguf_checkpoints import write_gguf
from tests.support.quantized_checkpoints import write_awq, write_mxfp4
from tests.support.rank_runs import NUM_TOKENS, prompts, ways
from transformers import AutoModelForCausalLM

from quire.errors import ModelError, OptionError
from quire.testing.greedy import assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.tiny_checkpoints import make_checkpoint

# in the default run, a way each; the others by night
SAMPLE = {
    "chunks": "qwen3_moe",
    "preempted": "mixtral",
    "swapped": "gpt_oss",
    "ahead": "deepseek_v2",
    "drafts": "qwen3_next",
}
OTHERS = [
    "qwen2_moe", "deepseek_v2_groups", "deepseek_v3_groups", "llama4", "granitemoehybrid", "minimax_m2", "hy_v3",
    "ernie4_5_moe", "mimo_v2_flash",
]  # fmt: skip
WAYS = ways(96)
EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def generate(path, **options):
    """(tokens of each prompt, tokens that each expert has computed)"""
    core = real_core(path, kv_cache_memory_bytes=16 << 20, **options)
    try:
        return generate_greedy(core, prompts(), NUM_TOKENS), core.executor.control("expert_tokens", {})
    finally:
        core.shutdown()


def check(tmp_path, family, way, **options):
    path = make_checkpoint(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found, counts = generate(path, **{**EXPERTS, **WAYS[way], **options})
    for ours, prompt in zip(found, prompts(), strict=True):
        assert_same_tokens(ours, reference_generate(model, prompt, NUM_TOKENS), f"{family}, {way}, {options}")
    # rank 0 tells of the experts of all, as far as its stage has some
    assert 2 * sum(count > 0 for count in counts.values()) >= len(counts)


@pytest.mark.parametrize(("way", "family"), SAMPLE.items(), ids=str)
def test_tokens_are_those_of_transformers(tmp_path, family, way):
    check(tmp_path, family, way)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [*SAMPLE.values(), *OTHERS])
def test_tokens_of_every_family_in_every_way(tmp_path, family, way):
    check(tmp_path, family, way)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_experts_of_a_stage_are_shared_out(tmp_path, family):
    check(tmp_path, family, "chunks", pipeline_parallel_size=2)


def test_experts_need_not_be_shared_evenly(tmp_path):
    path = make_checkpoint(tmp_path, "mixtral", num_local_experts=5)
    assert generate(path, **EXPERTS) == generate(path)


STORED = {
    "float": ("qwen3_moe", {}, lambda path, source: source),
    "awq": ("qwen3_moe", {"moe_intermediate_size": 64}, write_awq),
    "mxfp4": ("gpt_oss", {}, write_mxfp4),
    "gguf": ("mixtral", {}, lambda path, source: write_gguf(path / "model.gguf", source)),
}
# inputs that are rounded to 8 bits would turn last bits of a sum into other tokens
FORMS = [
    ("float", {"quantization": "int8_weight_only"}), ("float", {"quantization": "int4_weight_only"}),
    ("awq", {}), ("mxfp4", {}), ("gguf", {"quantization": "int8_weight_only"}),
]  # fmt: skip


def stored_checkpoint(tmp_path, form):
    family, changes, write = STORED[form]
    source = make_checkpoint(tmp_path / "plain", family, **changes)
    path = tmp_path / "stored"
    path.mkdir()
    write(path, source)
    return {"float": source, "gguf": path / "model.gguf"}.get(form, path)


@pytest.mark.parametrize(("form", "options"), FORMS, ids=str)
def test_tokens_in_every_form_of_weights_are_those_of_one_rank(tmp_path, form, options):
    path = stored_checkpoint(tmp_path, form)
    assert generate(path, **EXPERTS, **options) == generate(path, **options)


@pytest.mark.parametrize("options", [{"enable_expert_parallel": True}, EXPERTS], ids=str)
def test_who_has_nothing_to_share_out_is_told(tmp_path, options):
    family = "llama" if "tensor_parallel_size" in options else "mixtral"
    with pytest.raises(OptionError, match="enable_expert_parallel: shares out experts"):
        real_core(make_checkpoint(tmp_path, family), **options)


def test_more_workers_than_experts_are_refused(tmp_path):
    path = make_checkpoint(tmp_path, "mixtral", num_local_experts=2, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(ModelError, match="4 workers cannot share 2 experts"):
        real_core(path, tensor_parallel_size=4, enable_expert_parallel=True)
