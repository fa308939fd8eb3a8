"""MXFP4 as gpt-oss is published: the weights of the file, kept at 4 bits, and the tokens of Transformers with them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import quantized_checkpoints as writers

from quire.errors import ModelError
from quire.testing.model_contract import check_cuts_and_mixtures
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker import kernels
from quire.worker.kernels.reference.packed_format import FP4, read_header
from quire.worker.layers import Experts
from quire.worker.model_loader import load_model

PROMPT = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "gpt_oss")


@pytest.fixture(scope="module")
def stored(source, tmp_path_factory):
    """(path of the checkpoint, the weights that it stands for)"""
    path = tmp_path_factory.mktemp("mxfp4")
    return path, writers.write_mxfp4(path, source)


def packed_experts(model):
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            for number, expert in enumerate(module.experts.values()):
                yield name, number, expert.gate_up_proj.packed, expert.down_proj.packed


def test_logits_are_those_of_transformers_with_the_weights_of_the_file(source, stored):
    path, weights = stored
    model = load_model(worker_config(path))
    reference = writers.reference_model(source, weights)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    found = ModelHarness(model).run(0, PROMPT)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    check_cuts_and_mixtures(model, PROMPT, expected)


def test_experts_keep_their_4_bits_and_their_numbers(stored):
    path, weights = stored
    for name, number, gate_up, down in packed_experts(load_model(worker_config(path, dtype="bfloat16"))):
        for packed in (gate_up, down):
            header = read_header(packed)
            assert (header.format, header.group, header.is_weight_only) == (FP4, 32, True)
            # a scale of 16 bits for 32 weights
            assert packed.nbytes < 0.57 * header.num_rows * header.num_columns + 64
        gate_up_of_file = weights[f"{name}.experts.gate_up_proj"][number].t()
        interleaved = torch.cat([gate_up_of_file[::2], gate_up_of_file[1::2]])
        assert torch.equal(kernels.unpack_weight(gate_up), interleaved)
        assert torch.equal(kernels.unpack_weight(down), weights[f"{name}.experts.down_proj"][number].t())


def test_the_option_rounds_inputs_and_leaves_the_codes(stored):
    path, _ = stored
    exact = ModelHarness(load_model(worker_config(path))).run(0, PROMPT)
    model = load_model(worker_config(path, quantization="int4", attention_backend="cpu"))
    packed = [weight for *_, gate_up, down in packed_experts(model) for weight in (gate_up, down)]
    assert {read_header(weight).format for weight in packed} == {FP4}
    found = ModelHarness(model).run(0, PROMPT)
    assert not torch.equal(found, exact)
    assert torch.equal(ModelHarness(model).run(0, PROMPT, chunk_size=7), found)


def test_bfloat16_gives_the_same_bits_however_a_prompt_is_cut(stored):
    model = load_model(worker_config(stored[0], dtype="bfloat16", attention_backend="cpu"))
    whole = ModelHarness(model).run(0, PROMPT)
    assert torch.equal(ModelHarness(model).run(0, PROMPT, chunk_size=7), whole)
    assert torch.equal(ModelHarness(model).run(0, PROMPT, chunk_size=1), whole)


def change_tensors(path, source, change):
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    path.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((source / name).read_bytes())
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def without_scales(tensors):
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]


def broken_scale(tensors):
    tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 3, 1] = 255


def of_other_groups(tensors):
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    tensors[name] = tensors[name].view(*tensors[name].shape[:2], -1, 8)


def huge_scale(tensors):
    tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 3, 1] = 253


def without(dimension):
    def change(tensors):
        for part in ("blocks", "scales"):
            name = f"model.layers.1.mlp.experts.gate_up_proj_{part}"
            tensors[name] = tensors[name].narrow(dimension, 0, 0).contiguous()

    return change


def biases_of(*shape):
    def change(tensors):
        tensors["model.layers.1.mlp.experts.gate_up_proj_bias"] = torch.zeros(shape)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_scales, ["model.layers.1.mlp.experts", "no down_proj_scales"]),
        (broken_scale, ["model.layers.1.mlp.experts", "infinities or NaN"]),
        (huge_scale, ["model.layers.1.mlp.experts", "infinities or NaN"]),
        (without(0), ["gate_up_proj_blocks", "[0, 256, 2, 16]"]),
        (without(1), ["gate_up_proj_blocks", "[4, 0, 2, 16]"]),
        (without(2), ["gate_up_proj_blocks", "[4, 256, 0, 16]"]),
        (biases_of(), ["gate_up_proj_bias", "cannot be taken apart"]),
        (biases_of(4), ["gate_up_proj_bias", "cannot be taken apart"]),
        (of_other_groups, ["gate_up_proj_blocks", "uint8 [experts, outputs, groups, 16]"]),
    ],
)
def test_a_damaged_file_is_one_line(change, words, stored, tmp_path):
    change_tensors(tmp_path, stored[0], change)
    with pytest.raises(ModelError) as caught:
        load_model(worker_config(tmp_path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_model_that_has_no_such_experts_says_so(stored, tmp_path):
    """The names are those of no other model."""
    llama = make_checkpoint(tmp_path, "llama")
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    load_model(worker_config(llama))  # nothing in it is quantised
    change_tensors(tmp_path / "other", stored[0], lambda tensors: None)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks"):
        load_model(worker_config(tmp_path / "other"))
