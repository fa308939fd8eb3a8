"""Workers that share a model give the tokens of one, and where they are asked to, its bits."""

import pytest
import torch
from tests.support import quantized_checkpoints as writers
from tests.support.gguf_checkpoints import write_gguf
from tests.support.rank_runs import NUM_TOKENS, prompts, ways
from transformers import AutoModelForCausalLM

from quire.messages import EngineRequest
from quire.sampling_params import SamplingParams
from quire.testing.greedy import assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.tiny_checkpoints import make_checkpoint

# in the default run; the others by night
SAMPLE = ["llama", "qwen3_moe", "deepseek_v3_groups", "lfm2"]
OTHERS = [
    "llama_rope_llama3", "mistral", "qwen2", "qwen3", "opt", "gpt2", "mixtral", "qwen2_moe", "gpt_oss", "deepseek_v2",
    "llama4", "qwen3_next", "qwen3_5_text", "mamba2", "granitemoehybrid", "gemma3", "gemma4",
    "olmo2", "minimax_m2",
]  # fmt: skip
WAYS = ways(40)
# those with several block tables, or states, need more for one request
MORE_BLOCKS = {
    "qwen2_moe": 66, "gpt_oss": 66, "llama4": 66, "qwen3_next": 40, "qwen3_5_text": 40, "granitemoehybrid": 90,
    "gemma3": 66, "gemma4": 44,
}  # fmt: skip
# most of their blocks are of states, which do not grow: who does not fit waits, and few or none give way
STEADY = {"mamba2", "granitemoehybrid", "lfm2", "qwen3_next", "qwen3_5_text"}


def with_two(path, way, **options):
    """(tokens of each prompt, statistics)"""
    core = real_core(path, **{"tensor_parallel_size": 2, "kv_cache_memory_bytes": 16 << 20, **WAYS[way], **options})
    try:
        return generate_greedy(core, prompts(), NUM_TOKENS), core.statistics()
    finally:
        core.shutdown()


def check(tmp_path, family, way):
    path = make_checkpoint(tmp_path, family)
    is_scarce = "num_gpu_blocks_override" in WAYS[way]
    scarce = {"num_gpu_blocks_override": MORE_BLOCKS.get(family, 24), "max_model_len": 66} if is_scarce else {}
    found, statistics = with_two(path, way, **scarce)
    assert statistics["num_preemptions_total"] > 0 or not is_scarce or family in STEADY
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for ours, prompt in zip(found, prompts(), strict=True):
        assert_same_tokens(ours, reference_generate(model, prompt, NUM_TOKENS), f"{family}, {way}")


@pytest.mark.parametrize(("family", "way"), list(zip(SAMPLE, WAYS, strict=False)), ids=str)
def test_tokens_are_those_of_transformers(tmp_path, family, way):
    check(tmp_path, family, way)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", SAMPLE + OTHERS)
def test_tokens_of_every_family_in_every_way(tmp_path, family, way):
    check(tmp_path, family, way)


# what a checkpoint comes in, of which each rank reads its part
STORED = {
    "gptq": (writers.write_gptq, {}),
    "gguf": (lambda path, source, kind: write_gguf(path / "model.gguf", source, kind), {"kind": "Q4_0"}),
    "gptq act-order": (writers.write_gptq, {"act_order": True}),
    "awq": (writers.write_awq, {}),
    "packed 4": (writers.write_compressed_packed, {"symmetric": False}),
    "fp8": (writers.write_fp8, {"block": (24, 40)}),
}


@pytest.mark.parametrize(
    ("form", "grid"),
    [
        pytest.param(form, grid, marks=() if (form, size) in (("gptq", 2), ("gguf", 2)) else pytest.mark.nightly)
        for form in STORED
        for size, grid in (
            (2, {"tensor_parallel_size": 2}),
            (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        )
    ],
    ids=str,
)
def test_tokens_in_every_form_of_weights_are_those_of_one_rank(tmp_path, form, grid):
    write, arguments = STORED[form]
    source = make_checkpoint(tmp_path / "plain", "llama")
    path = tmp_path / "stored"
    path.mkdir()
    write(path, source, **arguments)
    path = path / "model.gguf" if form == "gguf" else path
    # inputs that are rounded to 8 bits would turn last bits of a sum into other tokens
    options = {"quantization": "int8_weight_only"} if form == "gguf" else {}
    shared, alone = (with_two(path, "chunks", **one, **options)[0] for one in (grid, {"tensor_parallel_size": 1}))
    assert shared == alone


def log_probabilities(path, **options):
    core = real_core(path, rank_invariant=True, kv_cache_memory_bytes=16 << 20, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    try:
        for number, prompt in enumerate(prompts()):
            core.add(EngineRequest(request_id=number, prompt_token_ids=prompt, sampling=sampling))
        found = []
        while core.has_work:
            outputs = core.step()
            found += [(one.sequence_id, position.token_ids, position.logprobs) for one in outputs.logprobs
                      for position in one.positions]  # fmt: skip
        return found
    finally:
        core.shutdown()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("qwen2", {"dtype": "float32"}),
        ("mistral", {"quantization": "int8"}),
        ("olmo2", {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_log_probabilities_have_the_same_bits_with_one_rank_and_with_two(tmp_path, family, options):
    # sizes whose slices are whole words and groups
    path = make_checkpoint(tmp_path, family)
    alone = log_probabilities(path, **options)
    assert alone
    assert log_probabilities(path, tensor_parallel_size=2, **options) == alone


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}],
    ids=str,
)
def test_log_probabilities_have_the_same_bits_with_one_two_and_four_ranks(tmp_path, options):
    # an eighth of the inputs is a whole group of 32
    path = make_checkpoint(tmp_path, "mistral", hidden_size=256, intermediate_size=256, head_dim=64)
    alone = log_probabilities(path, **options)
    assert alone
    for size in (2, 4):
        assert log_probabilities(path, tensor_parallel_size=size, **options) == alone, f"{size} ranks"
