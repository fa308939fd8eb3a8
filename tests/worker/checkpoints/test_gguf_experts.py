"""GGUF files of mixtures of experts and of latent attention: tokens are those of Transformers with the same weights."""

import functools
import logging

import pytest
import torch
from tests.support.gguf_checkpoints import write_gguf
from tests.support.quantized_checkpoints import reference_model
from tests.support.sampled import sampled

from quire.config import ModelFacts
from quire.errors import ModelError
from quire.testing.greedy import assert_same_tokens, generate_greedy, real_core, reference_generate
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.checkpoints.gguf import GGUFCheckpoint
from quire.worker.kernels import cpu
from quire.worker.layers.quantization import QuantizedWeight
from quire.worker.layers.stored_weight import read
from quire.worker.model_loader import load_model

pytest.importorskip("gguf")
NUM_TOKENS = 20
# longer than a window, and than a step of some runs
PROMPT = [(7 * place * place + 3) % 320 for place in range(40)]
TIGHT = {"atol": 5e-4, "rtol": 1e-4}
_LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "head_dim": 16, "moe_intermediate_size": 64, "num_hidden_layers": 3,
}  # fmt: skip
# the two numbers of a file's one
_YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
    "mscale_all_dim": 0.7,
}  # fmt: skip
# family -> (tiny checkpoint, what differs from it: what such files can say)
FAMILIES = {
    "mixtral": ("mixtral", {"num_local_experts": 12}),
    "qwen2_moe": (
        "qwen2_moe",
        {"mlp_only_layers": [], "use_sliding_window": False, "moe_intermediate_size": 64,
         "shared_expert_intermediate_size": 96},
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True, "moe_intermediate_size": 64}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v2_groups": ("deepseek_v2_groups", {**_LATENT, "rope_parameters": _YARN}),
    "deepseek_v3": ("deepseek_v3_groups", {**_LATENT, "rope_parameters": _YARN}),
}  # fmt: skip
# what is published for each: experts of gpt-oss in MXFP4
KINDS = {**dict.fromkeys(FAMILIES, "Q8_0"), "gpt_oss": lambda name: "MXFP4" if "_exps" in name else "Q8_0"}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """Each is written once."""

    @functools.cache
    def made(family):
        name, changes = FAMILIES[family]
        return make_checkpoint(tmp_path_factory.mktemp(family), name, **changes)

    return made


@pytest.fixture(scope="module")
def written_of(source_of, tmp_path_factory):
    @functools.cache
    def made(family):
        path = tmp_path_factory.mktemp("gguf") / f"{family}.gguf"
        return path, reference_model(source_of(family), write_gguf(path, source_of(family), KINDS[family]))

    return made


@pytest.fixture
def source(family, source_of):
    return source_of(family)


@pytest.fixture
def written(family, written_of):
    """The file, and Transformers' model with its weights."""
    return written_of(family)


def logits(path, **options):
    return ModelHarness(load_model(worker_config(path, **options))).run(0, PROMPT)


def reference_logits(model):
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


# policies, memory that is short, drafts, a step ahead or not: each in one of them
WAYS = {
    "at once": {"scheduling_policy": "priority"},
    "cut, recomputed": {
        "max_num_batched_tokens": 24, "preemption_mode": "recompute",
        "async_scheduling": True, "scheduling_policy": "fifo",
    },
    "cut, swapped": {
        "max_num_batched_tokens": 24, "preemption_mode": "swap",
        "async_scheduling": False, "scheduling_policy": "two_level", "staging_size": 2,
    },
    "drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        "scheduling_policy": "srtf",
    },
}  # fmt: skip
# blocks; with windows a layer has some of its own
SCARCE = {"gpt_oss": 52}


@pytest.mark.parametrize(
    ("way", "family"),
    sampled(WAYS, FAMILIES, n=14),
    indirect=["family"],
)
def test_greedy_tokens_are_those_of_transformers(way, family, written):
    path, model = written
    memory = {"num_gpu_blocks_override": SCARCE.get(family, 24)} if "cut" in way else {}
    prompts = [PROMPT, [*PROMPT[:24], 9, 9, 1], [4, 5, 6] * 9, [31], PROMPT[:30]]
    core = real_core(
        path,
        quantization="int8_weight_only",
        kv_cache_memory_bytes=2**26,
        block_size=4,
        max_model_len=80,
        **WAYS[way],
        **memory,
    )
    found = generate_greedy(core, prompts, NUM_TOKENS)
    statistics = core.statistics()
    core.shutdown()
    for prompt, tokens in zip(prompts, found, strict=True):
        assert_same_tokens(tokens, reference_generate(model, prompt, NUM_TOKENS), f"prompt of {len(prompt)}")
    assert statistics["num_preemptions_total"] > 0 or "cut" not in way


def test_the_configuration_is_that_of_the_plain_checkpoint(family, source, written):
    plain, found = ModelFacts.read(source).hf_config, ModelFacts.read(written[0]).hf_config
    assert found["model_type"] == plain["model_type"]
    names = (
        "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
        "intermediate_size", "shared_expert_intermediate_size", "n_shared_experts", "norm_topk_prob", "n_group",
        "topk_group", "routed_scaling_factor", "first_k_dense_replace", "kv_lora_rank", "q_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_types",
    )  # fmt: skip
    compared = [name for name in names if plain.get(name) is not None and name in found]
    for name in compared:
        assert found[name] == (pytest.approx(plain[name]) if isinstance(plain[name], float) else plain[name]), name
    assert len(compared) >= 3


def test_codes_of_experts_are_kept_to_the_last_bit(family, source, tmp_path):
    path = tmp_path / "model.gguf"
    weights = write_gguf(path, source, KINDS[family])
    found = {name: read(weight) for name, weight in GGUFCheckpoint(ModelFacts.read(path), torch.float32).tensors()}
    experts = [name for name in found if ".experts." in name and name.endswith(".weight")]
    assert experts
    for name in experts:
        weight = found[name]
        assert isinstance(weight, QuantizedWeight), name
        if name in weights:
            assert torch.equal(weight.dequantize(torch.float32), weights[name])
    # an expert is whole before the next one comes
    owners = [name.partition(".experts.")[2].partition(".")[0] for name in experts]
    layers = [name.split(".")[2] for name in experts]
    assert len(set(zip(layers, owners, strict=True))) == len(experts) // 3
    assert all(len({*zip(layers[i : i + 3], owners[i : i + 3], strict=True)}) == 1 for i in range(0, len(experts), 3))


@pytest.mark.parametrize("layout", ["alone", "merged"])
def test_files_of_another_layout_give_the_same_bits(layout, tmp_path):
    name, changes = FAMILIES["mixtral"]
    source = make_checkpoint(tmp_path / "plain", name, **changes)
    write_gguf(tmp_path / "stacked.gguf", source, "Q8_0")
    write_gguf(tmp_path / "other.gguf", source, "Q8_0", layout=layout)
    assert torch.equal(logits(tmp_path / "other.gguf"), logits(tmp_path / "stacked.gguf"))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_latent_attention_may_be_one_tensor(kind, tmp_path):
    """As before the two directions were stored: values keep their codes, keys are turned as floats."""
    name, changes = FAMILIES["deepseek_v2"]
    source, path = make_checkpoint(tmp_path / "plain", name, **changes), tmp_path / "model.gguf"
    types = {"attn_kv_b.weight": kind}
    weights = write_gguf(path, source, lambda name: types.get(name.split(".", 2)[-1], "F32"), layout="whole kv_b")
    found, expected = logits(path), reference_logits(reference_model(source, weights))
    if kind == "F32":
        torch.testing.assert_close(found, expected, **TIGHT)
    # inputs of codes are rounded, of which wide weights make much
    assert ((found - expected).square().mean() / expected.square().mean()).sqrt() < 0.05
    projection = load_model(worker_config(path)).model.layers[0].self_attn.kv_b_proj
    if cpu.load() and kind == "Q8_0":
        assert projection.values.packed.nbytes < projection.keys.packed.nbytes / 2


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "MXFP4", "BF16", "IQ4_NL"])
def test_every_kind_of_codes(kind, tmp_path):
    """Blocks of 256 are rows here; routers are F32 in every file."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    source = make_checkpoint(tmp_path / "plain", "qwen3_moe", norm_topk_prob=True, **sizes)
    path = tmp_path / "model.gguf"
    model = reference_model(source, write_gguf(path, source, kind))
    found, expected = logits(path, quantization="int8_weight_only" if kind != "BF16" else None), reference_logits(model)
    if kind in ("Q4_0", "MXFP4", "BF16", "IQ4_NL"):
        torch.testing.assert_close(found, expected, **TIGHT)
    # 11 bits for the scale and the zero of a group; these models have wide weights
    assert ((found - expected).square().mean() / expected.square().mean()).sqrt() < 0.05


def test_an_expert_of_zeros_is_packed_as_the_others(tmp_path):
    """One that was never trained: its scales are 0, from which no zero point can be told."""
    from safetensors.torch import load_file, save_file

    source = make_checkpoint(tmp_path / "plain", "mixtral")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts.1." in name:
            tensor.zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "model.gguf"
    model = reference_model(source, write_gguf(path, source, "Q4_0"))
    torch.testing.assert_close(logits(path, quantization="int8_weight_only"), reference_logits(model), **TIGHT)


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_a_token_has_its_bits_however_its_prompt_is_cut(scheme, family, written):
    if not cpu.load():
        pytest.skip("torch's own kernels promise no bits")
    model = load_model(worker_config(written[0], dtype="bfloat16", quantization=scheme, attention_backend="cpu"))
    whole = ModelHarness(model).run(0, PROMPT)
    harness = ModelHarness(model)
    pieces = [harness.run(0, PROMPT[:1]), harness.run(0, PROMPT[1:18]), harness.run(0, PROMPT[18:])]
    assert torch.equal(torch.cat(pieces), whole)
    beside_others = ModelHarness(model).step({0: PROMPT, 1: [7, 8, 9], 2: PROMPT[:5]})
    assert torch.equal(beside_others[0], whole)


def test_a_file_that_says_nothing_of_groups_is_read_without_and_says_so(tmp_path, caplog):
    name, changes = FAMILIES["deepseek_v2"]
    source, path = make_checkpoint(tmp_path / "plain", name, **changes), tmp_path / "model.gguf"
    write_gguf(path, source, "Q8_0")
    with caplog.at_level(logging.INFO, logger="quire"):
        expected = logits(path)
    assert "groups of experts" not in caplog.text
    write_gguf(
        path,
        source,
        "Q8_0",
        changes=dict.fromkeys(("deepseek2.expert_group_count", "deepseek2.expert_group_used_count")),
    )
    with caplog.at_level(logging.INFO, logger="quire"):
        assert torch.equal(logits(path), expected)
    assert "model.gguf says nothing of groups of experts" in caplog.text


def test_layers_that_only_draft_are_left_out(tmp_path):
    name, changes = FAMILIES["deepseek_v3"]
    source, path = make_checkpoint(tmp_path / "plain", name, **changes), tmp_path / "model.gguf"
    write_gguf(path, source, "Q8_0")
    expected = logits(path)
    drafting = {"deepseek2.block_count": 4, "deepseek2.nextn_predict_layers": 1}
    more = {"blk.3.nextn.enorm.weight": [1.0] * 64, "blk.3.attn_norm.weight": [1.0] * 64}
    write_gguf(path, source, "Q8_0", changes=drafting, vectors=more)
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"qwen3moe.expert_count": 3}, r"ffn_\w+_exps.weight is \[4, .* expected are 3 experts"),
        ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func=2 is not supported"),
        ("qwen3_moe", {"qwen3moe.expert_weights_scale": 2.0}, "expert_weights_scale=2.0 is not supported"),
        ("qwen3_moe", {"qwen3moe.expert_used_count": "two"}, "expert_used_count=two must be a whole number"),
        ("gpt_oss", {"gpt-oss.attention.sliding_window_pattern": [True]}, "sliding_window_pattern has 1 layers"),
        ("deepseek_v3", {"deepseek2.expert_gating_func": 4}, "expert_gating_func=4 is not supported"),
        ("deepseek_v3", {"deepseek2.attention.key_length_mla": 16}, "16 numbers, 16 of them rotary"),
        ("deepseek_v3", {"deepseek2.nextn_predict_layers": 3}, "nextn_predict_layers=3 of 3 layers leaves none"),
        ("deepseek_v3", {"deepseek2.attention.kv_lora_rank": None}, "no deepseek2.attention.kv_lora_rank"),
        ("deepseek_v3", {"deepseek2.expert_group_count": "many"}, "expert_group_count=many must be a whole number"),
    ],
)
def test_settings_that_are_not_read_are_named(family, changes, message, tmp_path):
    name, differences = FAMILIES[family]
    source, path = make_checkpoint(tmp_path / "plain", name, **differences), tmp_path / "model.gguf"
    write_gguf(path, source, KINDS[family], changes=changes)
    with pytest.raises(ModelError, match=message):
        load_model(worker_config(path))


def test_experts_of_different_types_are_refused(tmp_path):
    source, path = make_checkpoint(tmp_path / "plain", "mixtral"), tmp_path / "model.gguf"
    write_gguf(path, source, lambda name: "Q4_0" if "ffn_up.1" in name else "Q8_0", layout="alone")
    with pytest.raises(ModelError, match=r"ffn_up\.\d\.weight is of type Q\w_0, and .* the experts of a layer must"):
        load_model(worker_config(path))
