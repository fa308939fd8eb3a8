"""GPTQ, AWQ, compressed-tensors and FP8: the model computes what Transformers computes with the weights of the file."""

import json
import logging
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import quantized_checkpoints as writers

from quire.config.quantization import declared_quantization
from quire.errors import ModelError
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.layers.quantization.rounding import to_int8
from quire.worker.model_loader import load_model

PROMPT = [7, 99, 3, 250, 18, 6, 77, 140]
# In float32, with activations as they are: nothing but the order of sums differs.
TIGHT = {"atol": 1e-4, "rtol": 1e-4}

# name -> (writer, its arguments)
FORMATS = {
    "gptq": (writers.write_gptq, {}),
    "gptq symmetric": (writers.write_gptq, {"symmetric": True, "group": 64}),
    "gptq 8 bits, one group": (writers.write_gptq, {"bits": 8, "group": -1}),
    "gptq second version": (writers.write_gptq, {"version": "gptq_v2"}),
    "gptq act-order": (writers.write_gptq, {"act_order": True}),
    "gptq, some layers not": (writers.write_gptq, {"skipped": ("layers.1.", "v_proj")}),
    "awq": (writers.write_awq, {}),
    "awq, some layers not": (writers.write_awq, {"skipped": ("k_proj", "layers.0.mlp")}),
    "int8": (writers.write_compressed_int8, {"rounds_inputs": False}),
    "int8 with zero points": (writers.write_compressed_int8, {"rounds_inputs": False, "symmetric": False}),
    "packed 4": (writers.write_compressed_packed, {}),
    "packed 4 with zero points": (writers.write_compressed_packed, {"symmetric": False}),
    "packed 8": (writers.write_compressed_packed, {"bits": 8, "group": 64}),
    "packed, act-order": (writers.write_compressed_packed, {"act_order": True}),
    "packed, some layers not": (writers.write_compressed_packed, {"skipped": ("o_proj",)}),
    "fp8 by output": (writers.write_compressed_fp8, {}),
    "fp8 by tensor": (writers.write_compressed_fp8, {"by_channel": False}),
    "fp8 in blocks": (writers.write_fp8, {"block": (16, 32)}),
    "fp8 in uneven blocks": (writers.write_fp8, {"block": (24, 40)}),
    "fp8 plain": (writers.write_fp8, {"block": None}),
    "nvfp4": (writers.write_float4, {"kind": "compressed", "group": 16}),
    "mxfp4, compressed": (writers.write_float4, {"kind": "compressed", "group": 32}),
    "nvfp4 of modelopt": (writers.write_float4, {"kind": "modelopt", "group": 16}),
}
OTHERS = ("qwen2", "qwen3_tied", "mistral_full", "deepseek_v2", "phi3")
WRONG = "down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "llama")


@pytest.fixture(scope="module")
def sources(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    return {"llama": source} | {name: make_checkpoint(folder / name, name) for name in OTHERS}


def logits(path, **options):
    return ModelHarness(load_model(worker_config(path, **options))).run(0, PROMPT)


def error(found, expected):
    """Root of the mean squared difference, as a part of the logits' own. These models have wide weights, which make
    much of small errors; the bounds on the embedded model are in test_quantization_accuracy.py."""
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()


def reference_logits(source, weights):
    with torch.inference_mode():
        return writers.reference_model(source, weights)(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_stored_weights(name, source, tmp_path):
    write, arguments = FORMATS[name]
    weights = write(tmp_path, source, **arguments)
    torch.testing.assert_close(logits(tmp_path), reference_logits(source, weights), **TIGHT)


@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize("name", ["gptq", "awq", "int8", "packed 4", "fp8 in blocks"])
def test_every_architecture_reads_every_format(architecture, name, sources, tmp_path):
    write, arguments = FORMATS[name]
    weights = write(tmp_path, sources[architecture], **arguments)
    torch.testing.assert_close(logits(tmp_path), reference_logits(sources[architecture], weights), **TIGHT)


@pytest.mark.parametrize("name", ["gptq", "awq", "int8", "packed 4 with zero points", "fp8 in blocks"])
def test_greedy_tokens_are_those_of_transformers(name, source, tmp_path):
    write, arguments = FORMATS[name]
    weights = write(tmp_path, source, **arguments)
    model = writers.reference_model(source, weights)
    with torch.inference_mode():
        expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0]
    harness = ModelHarness(load_model(worker_config(tmp_path)))
    tokens = list(PROMPT)
    step = harness.run(0, tokens)
    for _ in range(24):
        tokens.append(int(step[-1].argmax()))
        step = harness.run(0, tokens[-1:])
    assert tokens == expected.tolist()


def test_inputs_are_rounded_where_the_checkpoint_says_so(source, tmp_path):
    weights = writers.write_compressed_int8(tmp_path, source, rounds_inputs=True)
    expected, found = reference_logits(source, weights), logits(tmp_path)
    assert not torch.allclose(found, expected, **TIGHT)
    assert error(found, expected) < 0.08
    # What the checkpoint has as floats, the scheme quantises: here the head.
    head = to_int8(load_file(source / "model.safetensors")["lm_head.weight"], weight_only=True)
    expected = reference_logits(source, weights | {"lm_head.weight": head.dequantize(torch.float32)})
    torch.testing.assert_close(logits(tmp_path, quantization="int8_weight_only"), expected, **TIGHT)


def test_the_option_decides_how_inputs_are_taken(source, tmp_path):
    weights = writers.write_gptq(tmp_path, source)
    expected, found = reference_logits(source, weights), logits(tmp_path, quantization="int8")
    assert not torch.allclose(found, expected, **TIGHT)
    assert error(found, expected) < 0.08


@pytest.mark.parametrize("name", ["fp8 in blocks", "gptq act-order"])
def test_what_was_converted_is_said_and_may_be_quantised_anew(name, source, tmp_path, caplog):
    write, arguments = FORMATS[name]
    weights = write(tmp_path, source, **arguments)
    with caplog.at_level(logging.INFO, logger="quire"):
        found = logits(tmp_path, quantization="int8_weight_only")
    assert "21 layers" in caplog.text
    expected = reference_logits(source, weights)
    assert error(found, expected) < 0.06


def test_bfloat16_takes_the_nearest_numbers(source, tmp_path):
    weights = writers.write_fp8(tmp_path, source, block=(16, 32))
    model = load_model(worker_config(tmp_path, dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    name = "model.layers.0.mlp.down_proj.weight"
    from quire.worker import kernels

    layer = model.model.layers[0].mlp.down_proj
    stored = layer.weight.float() if layer.packed is None else kernels.unpack_weight(layer.packed)
    assert torch.equal(stored, weights[name].bfloat16().float())


# ---- damage and misfits ---------------------------------------------------------------------------------------------


def change(path, edit):
    """Edit the tensors of a layer by leaf; a tensor that becomes None goes."""
    tensors = load_file(path / "model.safetensors")
    prefix = next(name for name in tensors if WRONG in name).rpartition(".")[0]
    leaves = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(prefix + ".")}
    for leaf, tensor in edit(leaves).items():
        tensors.pop(f"{prefix}.{leaf}", None)
        if tensor is not None:
            tensors[f"{prefix}.{leaf}"] = tensor.contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("gptq", lambda leaves: {"scales": None}, "no scales beside"),
        ("gptq", lambda leaves: {"qzeros": None}, "no qzeros beside"),
        ("gptq", lambda leaves: {"scales": leaves["scales"][:, :-1]}, "qzeros: .* expected is"),
        ("gptq", lambda leaves: {"scales": leaves["scales"][:-1]}, "qzeros: .* a row for each of scales"),
        ("gptq", lambda leaves: {"qweight": leaves["qweight"].float()}, "qweight: .*float32, expected is int32"),
        ("gptq", lambda leaves: {"qweight": leaves["qweight"][:-1]}, "g_idx: .* 120 numbers"),
        ("gptq", lambda leaves: {"g_idx": leaves["g_idx"] + 9}, "g_idx: .* below 4"),
        ("gptq", lambda leaves: {"qweight": leaves["qweight"].flatten()}, "qweight: .* expected is int32"),
        ("gptq", lambda leaves: {"qzeros": leaves["qzeros"].float()}, "qzeros: .*float32, expected is int32"),
        ("gptq", lambda leaves: {"scales": leaves["scales"].flatten()}, r"scales: .* expected is \[groups, outputs\]"),
        ("awq", lambda leaves: {"qweight": leaves["qweight"].flatten()}, "qweight: .* expected is int32"),
        ("awq", lambda leaves: {"scales": leaves["scales"][:0]}, "scales: .* expected is"),
        ("awq", lambda leaves: {"qzeros": leaves["qzeros"].float()}, "qzeros: .*float32, expected is int32"),
        ("packed 4", lambda leaves: {"weight_shape": leaves["weight_shape"][:1]}, "weight_shape: .* two sizes"),
        ("packed 4", lambda leaves: {"weight_scale": leaves["weight_scale"][:, :0]}, "weight_scale: .* expected is"),
        ("awq", lambda leaves: {"scales": None}, "no scales beside"),
        ("awq", lambda leaves: {"qzeros": leaves["qzeros"][:, :-1]}, "qzeros: .* expected is"),
        ("awq", lambda leaves: {"qweight": leaves["qweight"][:-1]}, "4 groups do not divide 127 inputs"),
        ("int8", lambda leaves: {"weight_scale": None}, "int8, so it is quantised, but its scale is missing"),
        ("int8", lambda leaves: {"weight_scale": leaves["weight_scale"][:-1]}, "weight_scale: .* expected is"),
        ("packed 4", lambda leaves: {"weight_shape": None}, "no weight_shape beside"),
        ("packed 4", lambda leaves: {"weight_packed": leaves["weight_packed"][:, 1:]}, "weight_packed: .* expected"),
        ("packed 4", lambda leaves: {"weight_shape": leaves["weight_shape"] + 8}, "weight_packed: .* expected"),
        (
            "fp8 in blocks",
            lambda leaves: {"weight_scale_inv": None},
            "float8_e4m3fn, so it is quantised, but its scale",
        ),
        ("fp8 in blocks", lambda leaves: {"weight_scale_inv": leaves["weight_scale_inv"][:-1]}, "blocks of 16 x 32"),
        ("fp8 in blocks", lambda leaves: {"weight": leaves["weight"].half()}, "weight: .* a matrix of FP8"),
        ("gptq", lambda leaves: {"scales": leaves["scales"] * float("nan")}, "holds infinities or NaN"),
        ("int8", lambda leaves: {"weight_scale": leaves["weight_scale"] / 0}, "holds infinities or NaN"),
        ("gptq", lambda leaves: {"qweight": None, "g_idx": None}, "does not know|lacks"),
    ],
)
def test_a_broken_layer_is_one_clear_line(name, edit, message, source, tmp_path):
    write, arguments = FORMATS[name]
    write(tmp_path, source, **arguments)
    change(tmp_path, edit)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(worker_config(tmp_path))
    assert WRONG in str(caught.value)
    assert "\n" not in str(caught.value)


def declare(path, **changes):
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' .* only gptq, awq"),
        ("gptq", {"quant_method": None}, "quant_method=None"),
        ("gptq", {"bits": 3}, "bits=3 .* only 4, 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ("awq", {"version": "gemv"}, "version='gemv' .* only gemm"),
        ("awq", {"bits": 8}, "bits=8 .* only 4"),
        ("int8", {"format": "marlin-24"}, "format='marlin-24'"),
        ("int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ("int8", {"transform_config": {"config_groups": {}}}, "transform_config"),
        ("packed 4", {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 3}}}}, "num_bits=3"),
        ("packed 4", {"config_groups": {"group_0": {"targets": ["re:("]}}}, r"target re:\( is no regular expression"),
        (
            "packed 4",
            {"config_groups": {"group_0": {"targets": ["re:(.|.)*[A-Z]"]}}},
            "takes longer than 1.0 s with the name",
        ),
        (
            "fp8 by output",
            {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"block_structure": "128x128"}}}},
            "block_structure='128x128'",
        ),
        ("fp8 in blocks", {"fmt": "e3m4"}, "fmt='e3m4'"),
        ("fp8 in blocks", {"weight_block_size": 128}, "weight_block_size=128"),
        ("nvfp4 of modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ' .* only NVFP4, FP8"),
    ],
)
def test_an_unknown_setting_is_named_with_what_is_read(name, changes, message, source, tmp_path):
    write, arguments = FORMATS[name]
    write(tmp_path, source, **arguments)
    declare(tmp_path, **changes)
    with pytest.raises(ModelError, match=f"quantization_config: .*{message}|{message}"):
        load_model(worker_config(tmp_path))


@pytest.mark.parametrize("kind", ["compressed", "modelopt"])
@pytest.mark.parametrize("scale", [[1.0] * 5, [], [math.nan], [math.inf]], ids=["five", "none", "NaN", "infinity"])
def test_the_scale_of_a_whole_tensor_is_one_number(kind, scale, source, tmp_path):
    writers.write_float4(tmp_path, source, kind=kind, group=16)
    leaf = "weight_global_scale" if kind == "compressed" else "weight_scale_2"
    name = f"model.layers.0.self_attn.q_proj.{leaf}"
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, name: torch.tensor(scale)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{leaf}: .*(one number|infinite or NaN)"):
        load_model(worker_config(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"config_groups": [1]},
        {"config_groups": {"a": 5}},
        {"config_groups": {"a": {"targets": 5}}},
        {"config_groups": {"a": {"weights": "x"}}},
        {"sparsity_config": "x"},
    ],
    ids=str,
)
def test_settings_of_another_kind_are_named(changes):
    with pytest.raises(ModelError, match=r"quantization_config\.(config_groups|sparsity_config).* must be"):
        declared_quantization({"quantization_config": {"quant_method": "compressed-tensors", **changes}})


def test_4_bit_floats_in_groups_of_16_stay_codes_in_bfloat16(source, tmp_path):
    weights = writers.write_float4(tmp_path, source, kind="modelopt", group=16)
    model = load_model(worker_config(tmp_path, dtype="bfloat16"))
    packed = model.model.layers[0].mlp.down_proj.packed
    assert packed.nbytes < 1.3 * 64 * 128
    assert error(ModelHarness(model).run(0, PROMPT), reference_logits(source, weights)) < 0.05


def test_modelopt_may_say_it_in_a_file_of_its_own(source, tmp_path):
    weights = writers.write_float4(tmp_path, source, kind="modelopt", group=16)
    config = json.loads((tmp_path / "config.json").read_text())
    declared = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": declared}))
    torch.testing.assert_close(logits(tmp_path), reference_logits(source, weights), atol=1e-3, rtol=1e-3)


def test_models_through_transformers_are_not_read_quantised(tmp_path):
    source = make_checkpoint(tmp_path / "plain", "gemma")
    writers.write_gptq(tmp_path / "gptq", source)
    with pytest.raises(ModelError, match=r"comes quantised as gptq.*model_type=gemma"):
        load_model(worker_config(tmp_path / "gptq"))
    writers.write_gptq(tmp_path / "llama", make_checkpoint(tmp_path / "plain_llama", "llama"))
    with pytest.raises(ModelError, match="comes quantised as gptq"):
        load_model(worker_config(tmp_path / "llama", model_impl="transformers"))


def test_weights_that_must_be_turned_are_not_read_quantised(tmp_path):
    path = make_checkpoint(tmp_path, "gpt2")
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="comes quantised as gptq, which GPT2LMHeadModel cannot read"):
        load_model(worker_config(path))
