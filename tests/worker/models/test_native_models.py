import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelError
from quire.testing.model_contract import check_against_transformers, transformers_logits
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.attention import attention_layers
from quire.worker.model_loader import load_model
from quire.worker.models.transformers_fallback import TransformersModel

NATIVE = (
    "llama llama_tied llama_bias llama_rope_llama3 llama_rope_linear llama_rope_dynamic llama_rope_yarn mistral "
    "mistral_full qwen2 qwen2_window qwen3 qwen3_tied opt opt_post_norm gpt2 gpt2_inverse_layer "
    "mixtral qwen3_moe qwen2_moe deepseek_v2 deepseek_v2_groups deepseek_v3 deepseek_v3_groups deepseek_v3_halves "
    "deepseek_v3_bias llama4 llama4_dense gpt_oss gemma4 gemma4_moe lfm2 mamba2 granitemoehybrid "
    "granitemoehybrid_dense gemma3 gemma3_cap lfm2_moe bamba falcon_h1 falcon_h1_norm nemotron_h minimax "
    "bloom bloom_norm mpt falcon falcon_alibi falcon_new falcon_new_norm mamba falcon_mamba jamba "
    "smollm3 seed_oss granite exaone4 olmo2 glm4_moe glm4_moe_norm minimax_m2 hy_v3 ernie4_5_moe "
    "olmo3 olmo3_yarn phi3 phi3_long ministral3 ministral3_window phi phi_norm mimo_v2_flash"
).split()
# Transformers computes these in chunks by another way, which is less exact than a recurrence.
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_model_computes_what_transformers_computes(name, checkpoint, prompt):
    # the plain attention of Falcon adds the slopes of ALiBi twice
    reference = "sdpa" if name == "falcon_alibi" else "eager"
    model = check_against_transformers(checkpoint(name), prompt, reference=reference, model_impl="native")
    assert not isinstance(model, TransformersModel)


@pytest.mark.parametrize("name", DELTA_NETS)
def test_delta_nets_compute_what_transformers_computes(name, checkpoint, prompt):
    check_against_transformers(checkpoint(name), prompt, atol=2e-3, model_impl="native")


def test_the_cpu_kernels_compute_the_same_model(checkpoint, prompt):
    for name in ("mistral", "qwen3", "deepseek_v2_groups", "deepseek_v3_groups"):
        check_against_transformers(checkpoint(name), prompt, attention_backend="auto")


@pytest.mark.parametrize(
    ("name", "windows"), [("llama", [0, 0, 0]), ("mistral", [24, 24, 24]), ("qwen2_window", [0, 24, 24])]
)
def test_each_layer_says_what_it_keeps(name, windows, checkpoint):
    layers = attention_layers(load_model(worker_config(checkpoint(name))))
    assert [layer.spec.sliding_window for layer in layers.values()] == windows
    assert list(layers) == [f"model.layers.{index}.self_attn.attn" for index in range(3)]
    spec = layers["model.layers.0.self_attn.attn"].spec
    assert (spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.bytes_per_element) == (2, 16, 16, 4)


def test_bfloat16_stays_close_to_float32(checkpoint, prompt):
    logits = {
        dtype: ModelHarness(load_model(worker_config(checkpoint("llama"), dtype=dtype))).run(0, prompt)
        for dtype in ("float32", "bfloat16")
    }
    error = (logits["bfloat16"] - logits["float32"]).abs()
    assert error.mean() < 0.05 * logits["float32"].std()
    assert torch.equal(logits["bfloat16"], logits["bfloat16"].bfloat16().float())


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("ministral3", {"layer_types": ["full_attention"] * 3}, ["model_type=ministral3", "model_type=ministral."]),
        ("llama", {"hidden_act": "mish"}, ["mish", "silu"]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention"]),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ["group_limited_greedy", "model_impl=transformers"]),
        ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob=True", "False"]),
        ("deepseek_v3", {"scoring_func": "softmax"}, ["scoring_func='softmax'", "sigmoid"]),
        ("deepseek_v3", {"moe_layer_freq": 2}, ["moe_layer_freq=2", "1"]),
        ("granitemoehybrid", {"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu", "model_impl=transformers"]),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, ["'alibi'", "rope, nope or null"]),
        ("granitemoehybrid", {"mamba_n_groups": 3}, ["mamba_n_heads, mamba_n_groups=8, 3", "multiple"]),
        ("granitemoehybrid", {"num_experts_per_tok": 0}, ["0 of 4 experts"]),
        ("hy_v3", {"mlp_layer_types": ["dense", "mixed", "sparse"]}, ["'mixed'", "dense or sparse", "3 layers"]),
        ("ernie4_5_moe", {"use_bias": True}, ["use_bias=True", "model_impl=transformers"]),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, ["moe_norm_min=0.1", "1e-12"]),
    ],
)  # fmt: skip
def test_what_a_native_model_does_not_know_is_refused(name, changes, words, tmp_path):
    path = make_checkpoint(tmp_path, name, **changes)
    with pytest.raises(ModelError) as caught:
        load_model(worker_config(path, model_impl="native"))
    assert all(word in str(caught.value) for word in words)


def changed_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "curled"}, ["curled", "llama3", "model_impl=transformers"]),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, ["rope_type=longrope", "long_factor"]),
        ({"rope_type": "longrope", "long_factor": [1.0] * 7}, ["long_factor", "7", "8"]),
    ],
)
def test_angles_that_nobody_knows_are_refused(rope, words, tmp_path):
    path = make_checkpoint(tmp_path, "llama")
    changed_config(path, rope_parameters={"rope_theta": 1e4, "original_max_position_embeddings": 64, **rope})
    with pytest.raises(ModelError) as caught:
        load_model(worker_config(path))
    assert all(word in str(caught.value) for word in words)


def test_long_angles_are_chosen_by_max_model_len_and_not_by_the_batch(tmp_path, prompt):
    path = make_checkpoint(tmp_path, "phi3_long", original_max_position_embeddings=64)
    short = check_against_transformers(path, prompt, max_model_len=64)
    # Transformers takes the long angles as soon as a sequence has more than 64 tokens.
    longer = [*prompt, *prompt[:20]]
    long = check_against_transformers(path, longer, max_model_len=256)
    of_short, of_long = (ModelHarness(model).run(0, prompt) for model in (short, long))
    assert (of_short - of_long).abs().max() > 1e-2
    torch.testing.assert_close(of_long, transformers_logits(path, longer)[: len(prompt)], atol=1e-4, rtol=0)


@pytest.mark.parametrize("older", ["su", "yarn"])
def test_longrope_under_the_names_that_it_had(older, tmp_path, prompt):
    path = make_checkpoint(tmp_path, "phi3_long")
    expected = ModelHarness(load_model(worker_config(path))).run(0, prompt)
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    del rope["rope_type"]
    changed_config(path, rope_parameters=None, rope_scaling={**rope, "type": older})
    assert torch.equal(ModelHarness(load_model(worker_config(path))).run(0, prompt), expected)


def test_a_window_of_null_sees_everything(tmp_path, prompt):
    """Transformers cannot make the masks of this one, so what it makes of a wide window is what is compared."""
    path = make_checkpoint(tmp_path, "olmo3", sliding_window=256)
    expected = transformers_logits(path, prompt)
    changed_config(path, sliding_window=None)
    model = load_model(worker_config(path))
    assert [layer.sliding_window for layer in attention_layers(model).values()] == [0, 0, 0]
    torch.testing.assert_close(ModelHarness(model).run(0, prompt), expected, atol=1e-4, rtol=0)


def test_a_fused_tensor_of_a_wrong_height_is_refused(tmp_path):
    path = make_checkpoint(tmp_path, "phi3")
    changed_config(path, num_key_value_heads=1)
    with pytest.raises(ModelError, match=r"qkv_proj.*128 rows, 96 are expected"):
        load_model(worker_config(path))


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path, prompt):
    path = make_checkpoint(tmp_path, "deepseek_v3")
    expected = transformers_logits(path, prompt)
    changed_config(path, model_type="kimi_k2")
    model = load_model(worker_config(path))
    torch.testing.assert_close(ModelHarness(model).run(0, prompt), expected, atol=1e-4, rtol=0)


def test_layers_that_only_draft_are_left_out(tmp_path, prompt):
    """Published checkpoints of DeepSeek V3 hold one more layer than num_hidden_layers."""
    path = make_checkpoint(tmp_path, "deepseek_v3")
    file = path / "model.safetensors"
    tensors = load_file(file)
    more = {"eh_proj.weight": torch.ones(64, 128), "self_attn.kv_b_proj.weight": torch.ones(160, 32)}
    save_file({**tensors, **{f"model.layers.3.{name}": tensor for name, tensor in more.items()}}, file)
    changed_config(path, num_nextn_predict_layers=1)
    found = ModelHarness(load_model(worker_config(path))).run(0, prompt)
    changed_config(path, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match="tensors that the model does not know"):
        load_model(worker_config(path))
    save_file(tensors, file)
    assert torch.equal(found, ModelHarness(load_model(worker_config(path))).run(0, prompt))


DRAFTING = {
    "hy_v3": "model.layers.3.eh_proj.weight",
    "ernie4_5_moe": "model.mtp_linear_proj.0.weight",
    "mimo_v2_flash": "model.mtp.layers.0.eh_proj.weight",
}


@pytest.mark.parametrize("name", DRAFTING)
def test_what_only_drafts_means_nothing(name, tmp_path):
    path = make_checkpoint(tmp_path, name)
    file = path / "model.safetensors"
    save_file({**load_file(file), DRAFTING[name]: torch.ones(2, 2)}, file)
    load_model(worker_config(path))


def test_granite_4_is_read_as_published_and_as_transformers_keeps_it(tmp_path, prompt):
    path = make_checkpoint(tmp_path, "granitemoehybrid")
    expected = ModelHarness(load_model(worker_config(path))).run(0, prompt)
    kinds = ["mamba", "attention", "mamba"]
    file = path / "model.safetensors"
    tensors = load_file(file)
    published = {
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    }
    for names in (published, {new: old for old, new in published.items()}):
        tensors = {_renamed(name, names): tensor for name, tensor in tensors.items()}
        save_file(tensors, file)
        changed_config(path, layer_types=kinds)
        assert torch.equal(ModelHarness(load_model(worker_config(path))).run(0, prompt), expected)
    config = json.loads((path / "config.json").read_text())
    del config["layer_types"]
    (path / "config.json").write_text(json.dumps({**config, "layers_block_type": kinds}))
    assert torch.equal(ModelHarness(load_model(worker_config(path))).run(0, prompt), expected)


def _renamed(name, names):
    for old, new in names.items():
        name = name.replace(old, new)
    return name
