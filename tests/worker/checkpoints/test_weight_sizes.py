"""What `quire plan` says about weights is what they weigh when they are loaded."""

import json

import pytest
import torch
from tests.support import quantized_checkpoints as writers
from tests.support.gguf_checkpoints import write_gguf
from tests.support.sampled import sampled

from quire.config import ModelFacts
from quire.config.arithmetic import ModelShape
from quire.config.gguf_file import GGUFFile
from quire.config.weight_sizes import expert_bytes, weight_bytes
from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.errors import OptionError
from quire.interfaces.cli.bench_limits import ModelCost
from quire.interfaces.cli.plan import Weights
from quire.interfaces.cli.program import main
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint, make_model
from quire.worker.attention import attention_layers
from quire.worker.kernels import cpu
from quire.worker.model_config import read_model_config
from quire.worker.model_loader import building, load_model
from quire.worker.models.registry import native_class

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
FORMATS = {
    "gptq": (writers.write_gptq, {"group": 128}),
    "awq": (writers.write_awq, {"group": 64}),
    "int8": (writers.write_compressed_int8, {}),
    "packed": (writers.write_compressed_packed, {"group": 32}),
    "fp8": (writers.write_fp8, {"block": (128, 128)}),
}
SOURCES = ["llama", "llama_tied"]
SCHEMES = [None, "int8", "int4"]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    """Of a family and sizes; each is written once, and nobody writes into it."""
    made = {}

    def checkpoint(name, sizes):
        key = name, repr(sizes)
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(name), name, **sizes)
        return made[key]

    return checkpoint


@pytest.fixture(params=SOURCES)
def source(request, checkpoint_of):
    return checkpoint_of(request.param, SIZES)


@pytest.mark.parametrize("name", ["phi", "phi3", "olmo3", "ministral3", "starcoder2", "apertus", "nemotron", "arcee"])
def test_a_shape_has_the_weights_that_a_family_has(name):
    model = make_model(name)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.of(model.config.to_dict()).num_parameters == pytest.approx(count, rel=0.03)


def loaded_bytes(path, scheme):
    """Bytes of all matrices of the model, each counted once."""
    model = load_model(worker_config(path, dtype="bfloat16", quantization=scheme))
    tensors = [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name.endswith("packed"))]
    matrices = {id(tensor): tensor.nbytes for tensor in tensors if tensor.ndim == 2 or tensor.dtype.itemsize == 1}
    return sum(matrices.values())


def check(path, scheme):
    if not cpu.load():
        pytest.skip("the reference keeps codes of 4 bits in bytes")
    facts = ModelFacts.read(path)
    planned, _ = weight_bytes(facts, ModelShape.of(facts.hf_config), "bfloat16", scheme)
    # Headers, and panels that are not full.
    assert loaded_bytes(path, scheme) == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("scheme", [None, "int8", "int4", "int4_weight_only"])
def test_of_a_plain_checkpoint(scheme, source):
    check(source, scheme)


@pytest.mark.parametrize(
    ("name", "scheme", "source"),
    sampled(FORMATS, SCHEMES, SOURCES, n=15),
    indirect=["source"],
)
def test_of_a_quantised_checkpoint(name, scheme, source, tmp_path):
    write, arguments = FORMATS[name]
    write(tmp_path, source, **arguments)
    check(tmp_path, scheme)


@pytest.mark.parametrize(
    ("kind", "scheme", "source"),
    sampled(["BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4"], SCHEMES, SOURCES, n=12),
    indirect=["source"],
)
def test_of_a_gguf_file(kind, scheme, source, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model.gguf", source, kind)
    check(tmp_path / "model.gguf", scheme)


def k_m(name):
    """As files called Q4_K_M: parts of a layer differ."""
    return "Q6_K" if any(part in name for part in ("attn_v", "ffn_down", "output.weight", "token_embd")) else "Q4_K"


def mixed(name):
    """Floats and codes in one layer, and codes whose zeros differ."""
    kinds = {"attn_k.weight": "BF16", "ffn_gate.weight": "Q4_0", "attn_output.weight": "Q4_0"}
    return kinds.get(name.split(".", 2)[-1], "Q8_0")


@pytest.mark.parametrize(
    ("type_of", "scheme", "source"),
    sampled([k_m, mixed], SCHEMES, SOURCES, n=6),
    indirect=["source"],
)
def test_of_a_gguf_file_in_which_layers_are_made_of_several_types(type_of, scheme, source, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model.gguf", source, type_of)
    check(tmp_path / "model.gguf", scheme)


@pytest.mark.parametrize("kind", ["BF16", "Q4_0"])
def test_what_a_step_reads_of_a_gguf_file_is_all_but_an_untied_embedding(kind, source, tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    write_gguf(path, source, kind)
    facts = ModelFacts.read(path)
    shape = ModelShape.of(facts.hf_config)
    whole, _ = weight_bytes(facts, shape, "bfloat16", None)
    embedding = GGUFFile.read(path).tensors["token_embd.weight"].num_elements * {"BF16": 2, "Q4_0": 0.5625}[kind]
    expected = whole - (0 if shape.has_tied_embeddings else embedding)
    assert ModelCost.of(facts, "bfloat16", None).weight_bytes == pytest.approx(expected)


# as many as fill a panel of a router
EXPERTS = {
    "mixtral": {"num_local_experts": 32},
    "qwen3_moe": {"num_experts": 32, "moe_intermediate_size": 128},
    "qwen2_moe": {"num_experts": 32, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    "gpt_oss": {"num_local_experts": 32},
    "deepseek_v2": {
        "n_routed_experts": 32, "moe_intermediate_size": 128, "kv_lora_rank": 128, "q_lora_rank": 128,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "head_dim": 64,
    },
    "llama4": {
        "num_local_experts": 32, "intermediate_size": 128, "intermediate_size_mlp": 512, "head_dim": 64,
        "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2,
    },
    "gemma4_moe": {
        "num_experts": 32, "moe_intermediate_size": 128, "head_dim": 64, "global_head_dim": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


@pytest.fixture
def sparse(request, checkpoint_of):
    sizes = {**SIZES, "intermediate_size": 256, **EXPERTS[request.param]}
    if request.param == "gpt_oss":
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    return checkpoint_of(request.param, sizes)


# what turns latent vectors is a large part
WIDE_LATENT = {"kv_lora_rank": 256, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_attention_heads": 4}


@pytest.fixture
def sparse_gguf(request, checkpoint_of):
    pytest.importorskip("gguf")
    sizes = {**SIZES, "intermediate_size": 256, **EXPERTS[request.param]}
    sizes |= {"moe_intermediate_size": 256, "q_lora_rank": 256} if "moe_intermediate_size" in sizes else {}
    sizes |= {"mlp_only_layers": []} if request.param == "qwen2_moe" else {}
    sizes |= WIDE_LATENT if request.param == "deepseek_v2" else {}
    if request.param == "gpt_oss":
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    return checkpoint_of(request.param, sizes)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_of_inputs_of_each_layer_and_keys_that_layers_share(scheme, checkpoint_of):
    kinds = ["sliding_attention", "full_attention"]
    sizes = {"num_hidden_layers": 4, "layer_types": kinds * 2, "head_dim": 64, "global_head_dim": 128}
    inputs = {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 1024}
    check(checkpoint_of("gemma4", {**SIZES, **sizes, **inputs}), scheme)


@pytest.mark.parametrize(
    ("scheme", "sparse"),
    sampled(SCHEMES, EXPERTS, n=11),
    indirect=["sparse"],
)
def test_of_experts(scheme, sparse):
    check(sparse, scheme)


def k_m_of_experts(name):
    """Some rows are shorter than blocks of 256."""
    return "Q8_0" if "attn_k_b" in name or "attn_output" in name else k_m(name)


@pytest.mark.parametrize(
    ("scheme", "type_of", "sparse_gguf"),
    sampled(
        SCHEMES, ["Q8_0", "Q4_0", k_m_of_experts], ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v2"], n=10
    ),
    indirect=["sparse_gguf"],
)
def test_of_experts_in_a_gguf_file(type_of, scheme, sparse_gguf, tmp_path):
    write_gguf(tmp_path / "model.gguf", sparse_gguf, type_of)
    check(tmp_path / "model.gguf", scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_of_latent_attention_in_one_tensor_of_a_gguf_file(scheme, checkpoint_of, tmp_path):
    pytest.importorskip("gguf")
    sizes = {**SIZES, "intermediate_size": 256, **EXPERTS["deepseek_v2"], **WIDE_LATENT}
    source = checkpoint_of("deepseek_v2", sizes)
    write_gguf(tmp_path / "model.gguf", source, "Q8_0", layout="whole kv_b")
    check(tmp_path / "model.gguf", scheme)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_what_a_step_reads_of_experts_in_a_gguf_file(kind, checkpoint_of, tmp_path):
    """Of the experts, those that a token asks."""
    pytest.importorskip("gguf")
    sizes = {**SIZES, **EXPERTS["qwen3_moe"]}
    source, path = checkpoint_of("qwen3_moe", sizes), tmp_path / "model.gguf"
    write_gguf(path, source, kind)
    facts = ModelFacts.read(path)
    shape = ModelShape.of(facts.hf_config)
    bytes_of_a_weight = {"Q8_0": 1.0625, "Q4_0": 0.5625}[kind]
    assert expert_bytes(facts, shape, "bfloat16", None) == shape.num_expert_parameters * bytes_of_a_weight
    whole, _ = weight_bytes(facts, shape, "bfloat16", None)
    embedding = SIZES["vocab_size"] * SIZES["hidden_size"] * bytes_of_a_weight
    idle = shape.num_expert_parameters * bytes_of_a_weight * (1 - 2 / 32)
    assert ModelCost.of(facts, "bfloat16", None).step_bytes(1) == pytest.approx(whole - embedding - idle)
    assert Weights.of(facts, shape, "bfloat16", None).bytes_of_a_token == pytest.approx(whole - embedding - idle)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_of_latent_attention_that_comes_quantised(scheme, checkpoint_of, tmp_path):
    """Its keys are turned, which makes them floats; 4-bit codes of the others stay."""
    sizes = {**SIZES, **EXPERTS["deepseek_v2"], **WIDE_LATENT, "first_k_dense_replace": 0}
    source = checkpoint_of("deepseek_v2", sizes)
    writers.write_gptq(tmp_path / "gptq", source, group=128, skipped=("lm_head", "mlp.gate"))
    check(tmp_path / "gptq", scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_of_experts_that_come_quantised(scheme, checkpoint_of, tmp_path):
    sizes = {**SIZES, "intermediate_size": 256, "layer_types": ["sliding_attention", "full_attention"]}
    sizes |= EXPERTS["gpt_oss"]
    source = checkpoint_of("gpt_oss", sizes)
    writers.write_mxfp4(tmp_path / "mxfp4", source)
    check(tmp_path / "mxfp4", scheme)


# As published: parameters in billions, of which active (the authors count neither norms nor biases finer than this).
GEMMA_4 = {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 256, "global_head_dim": 512,
    "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "tie_word_embeddings": True,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "n_group": 8, "topk_group": 4,
    "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED = {
    "Mixtral-8x7B": (46.7, 12.9, {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "tie_word_embeddings": False,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": None,
    }),
    "Qwen3-30B-A3B": (30.5, 3.3, {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960,
    }),
    # its authors leave the embedding out of the active ones: 3.6
    "gpt-oss-20b": (20.9, 4.2, {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "head_dim": 64,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "tie_word_embeddings": False,
        "max_position_embeddings": 131072, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "quantization_config": {"quant_method": "mxfp4"},
    }),
    # its authors leave both embeddings out of the active ones: 2.4
    "DeepSeek-V2-Lite": (15.7, 2.66, {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400, "tie_word_embeddings": False,
    }),
    # three dense layers and one of experts: all 61 would take long to make
    "DeepSeek-V3, its first 4 layers": (15.1, 4.2, {**DEEPSEEK_V3, "num_hidden_layers": 4}),
    "Llama-4-Scout": (107.8, 17.2, {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "hidden_size": 5120, "head_dim": 128,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192, "no_rope_layers": [], "vocab_size": 202048, "tie_word_embeddings": False,
    }),
    # without 2.3 and 2.8 in tables of which a token reads a row: 2.8 and 5.1
    "Gemma-4-E2B": (4.65, 4.65, {
        **GEMMA_4, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "sliding_window": 512,
        "hidden_size_per_layer_input": 256, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    }),
    "Gemma-4-E4B": (7.5, 7.5, {
        **GEMMA_4, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_kv_shared_layers": 18, "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
    }),
    "Gemma-4-31B": (30.7, 30.7, {
        **GEMMA_4, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    }),
    "Gemma-4-26B-A4B": (25.2, 3.8, {
        **GEMMA_4, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_of_the_published_shapes_from_config_json_alone(name, tmp_path):
    billions, active, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = ModelFacts.read(tmp_path)
    shape = ModelShape.of(facts.hf_config)
    assert shape.num_parameters / 1e9 == pytest.approx(billions, abs=0.06)
    assert shape.num_active_parameters / 1e9 == pytest.approx(active, abs=0.06)
    # the model itself, without memory for its weights
    model_class = native_class(facts.model_type, config["architectures"])
    model_config = read_model_config(tmp_path / "config.json", facts.hf_config, model_class)
    with building(torch.bfloat16, torch.device("meta")):
        model = model_class(model_config, 64)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name and p.ndim == 2)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    planned, _ = weight_bytes(facts, shape, "bfloat16", None)
    # a scale of 16 bits for 32 codes of 4
    kept = whole - experts + experts * 0.5625 / 2 if "quantization_config" in config else whole
    assert planned == pytest.approx(kept, rel=0.002)
    specs = [layer.spec for layer in attention_layers(model).values()]
    assert shape.kv_bytes_per_token("bfloat16") == sum(spec.bytes_per_token for spec in specs)
    kept = sum(spec.bytes_per_token * min(spec.sliding_window or 20_000, 20_000) for spec in specs)
    assert shape.kv_bytes(20_000, "bfloat16") == kept
    # what the engine allocates for a token in all groups
    groups, block_bytes = make_groups(specs, 16)
    assert shape.kv_bytes_per_token("bfloat16") * 16 == len(groups) * block_bytes


def test_all_of_deepseek_v3():
    """671 and 37 billion as its authors count, who leave the embedding out of the active ones."""
    shape = ModelShape.of(DEEPSEEK_V3)
    assert shape.num_parameters / 1e9 == pytest.approx(671.0, abs=0.1)
    embedding = shape.vocab_size * shape.hidden_size
    assert (shape.num_active_parameters - embedding) / 1e9 == pytest.approx(36.6, abs=0.1)
    assert shape.kv_bytes_per_token("bfloat16") == 61 * 576 * 2


def test_the_command_says_what_a_token_reads(tmp_path, capsys):
    _, _, config = PUBLISHED["gpt-oss-20b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--memory", "32GiB", "--context", "8192"]) == 0
    told = capsys.readouterr().out
    assert "20.9" in told
    assert "4.186 billion active parameters (4 of 32 experts), reads" in told
    assert "GiB in mxfp4" in told


def test_a_step_of_many_tokens_reads_all_experts(tmp_path):
    _, _, config = PUBLISHED["Qwen3-30B-A3B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = ModelFacts.read(tmp_path)
    shape = ModelShape.of(facts.hf_config)
    cost = ModelCost.of(facts, "bfloat16", None)
    embedding = shape.vocab_size * shape.hidden_size
    assert cost.step_bytes(1) == pytest.approx(2 * (shape.num_active_parameters - embedding))
    assert cost.step_bytes(1000) == pytest.approx(2 * (shape.num_parameters - embedding))
    assert cost.step_bytes(1) < cost.step_bytes(8) < cost.step_bytes(64) < cost.step_bytes(1000)


def test_the_command_says_it(source, tmp_path, capsys):
    writers.write_gptq(tmp_path, source)
    assert main(["plan", str(tmp_path), "--quantization", "int8"]) == 0
    assert "MiB in gptq as int8" in capsys.readouterr().out
    assert main(["plan", str(source), "--quantization", "int4"]) == 0
    assert "MiB in int4" in capsys.readouterr().out


def test_a_scheme_of_another_package_has_no_known_size(source):
    facts = ModelFacts.read(source)
    with pytest.raises(OptionError, match="known for int8"):
        weight_bytes(facts, ModelShape.of(facts.hf_config), "bfloat16", "thirds")
