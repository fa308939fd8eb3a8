"""GGUF files: the model computes what Transformers computes with the weights that the package gguf reads from them."""

import json
import logging
import math
import shutil
import sys

import pytest
import torch
from tests.support.gguf_checkpoints import write_gguf
from tests.support.quantized_checkpoints import reference_model

from quire.config import ModelFacts
from quire.errors import ModelError
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker import kernels
from quire.worker.checkpoints.gguf import GGUFCheckpoint
from quire.worker.kernels import cpu
from quire.worker.layers.packing import pack_quantized
from quire.worker.layers.stored_weight import read
from quire.worker.model_loader import load_model

pytest.importorskip("gguf")
# Longer than the sliding window of the tiny Mistral.
PROMPT = [(7 * place * place + 3) % 320 for place in range(30)]
TIGHT = {"atol": 2e-4, "rtol": 1e-4}
# Packed weights have 11 bits for the scale and the zero of a group; products of two such numbers lose the rest. These
# models have wide weights, which make much of small errors.
ROUNDED = 0.03
FLOATS = ("F32", "F16", "BF16")
HALF_SCALES = ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "MXFP4")
CODES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS", "MXFP4")
# A block of the larger formats is a row here.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3_tied")


def k_m(name):
    """As files called Q4_K_M: some weights have more bits than others, also within one merged layer."""
    has_more = any(part in name for part in ("attn_v", "ffn_down", "output.weight", "token_embd"))
    return "Q6_K" if has_more else "Q4_K"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return {name: make_checkpoint(folder / name, name, **SIZES) for name in ARCHITECTURES}


def logits(path, **options):
    return ModelHarness(load_model(worker_config(path, **options))).run(0, PROMPT)


def reference_logits(source, weights):
    with torch.inference_mode():
        return reference_model(source, weights)(torch.tensor([PROMPT])).logits[0]


def check(found, expected, *, is_exact):
    if is_exact or not cpu.load():
        torch.testing.assert_close(found, expected, **TIGHT)
    assert error(found, expected) < ROUNDED


def error(found, expected):
    """Root of the mean squared difference, as a part of the logits' own."""
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()


@pytest.mark.parametrize("kind", [*FLOATS, *CODES])
def test_logits_are_those_of_the_stored_weights(kind, sources, tmp_path):
    path = tmp_path / "model.gguf"
    weights = write_gguf(path, sources["llama"], kind)
    found = logits(path, quantization="int8_weight_only" if kind in CODES else None)
    check(found, reference_logits(sources["llama"], weights), is_exact=kind in (*FLOATS, *HALF_SCALES))


@pytest.mark.parametrize("kind", CODES)
def test_codes_are_those_of_the_file_to_the_last_bit(kind, sources, tmp_path):
    """Before they are packed; and packed, no number is off by more than its scale's and its zero's last bit."""
    path = tmp_path / "model.gguf"
    weights = write_gguf(path, sources["llama"], kind)
    found = {name: read(weight) for name, weight in GGUFCheckpoint(ModelFacts.read(path), torch.float32).tensors()}
    assert weights
    for name, expected in weights.items():
        assert torch.equal(found[name].dequantize(torch.float32), expected)
        packed = kernels.unpack_weight(pack_quantized(found[name]))
        most = expected.abs().amax() if found[name].offsets is None else 2 * found[name].offsets.abs().amax()
        assert (packed - expected).abs().max() <= most * 2**-10


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("type_of", ["F32", "Q8_0", "Q4_0", k_m], ids=["F32", "Q8_0", "Q4_0", "Q4_K_M"])
def test_every_architecture_is_read(name, type_of, sources, tmp_path):
    path = tmp_path / "model.gguf"
    weights = write_gguf(path, sources[name], type_of)
    found = logits(path, quantization=None if type_of == "F32" else "int8_weight_only")
    check(found, reference_logits(sources[name], weights), is_exact=type_of is not k_m)


@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
def test_greedy_tokens_are_those_of_transformers(name, sources, tmp_path):
    path = tmp_path / "model.gguf"
    model = reference_model(sources[name], write_gguf(path, sources[name], k_m))
    with torch.inference_mode():
        expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None)[0]
    harness = ModelHarness(load_model(worker_config(path, quantization="int8_weight_only")))
    tokens = list(PROMPT)
    step = harness.run(0, tokens)
    for _ in range(20):
        tokens.append(int(step[-1].argmax()))
        step = harness.run(0, tokens[-1:])
    assert tokens == expected.tolist()


def test_inputs_are_rounded_unless_asked_otherwise(sources, tmp_path):
    path = tmp_path / "model.gguf"
    expected = reference_logits(sources["llama"], write_gguf(path, sources["llama"], "Q8_0"))
    found = logits(path)
    assert not torch.allclose(found, expected, **TIGHT)
    assert error(found, expected) < 0.15


@pytest.mark.parametrize("kind", ["IQ2_XXS", "TQ2_0", "IQ3_S"])
def test_other_types_are_computed_by_the_package(kind, sources, tmp_path, caplog, monkeypatch):
    path = tmp_path / "model.gguf"
    weights = write_gguf(path, sources["qwen3_tied"], kind)
    with caplog.at_level(logging.INFO, logger="quire"):
        found = logits(path)
    assert f"weights of the types {kind} were dequantised to float32" in caplog.text
    torch.testing.assert_close(found, reference_logits(sources["qwen3_tied"], weights), **TIGHT)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=f"{kind}, which needs the package gguf"):
        load_model(worker_config(path))


def test_the_rotation_of_llama_3_is_in_a_tensor(tmp_path):
    """One number for each frequency, computed by the writer of the file."""
    source, path = make_checkpoint(tmp_path / "plain", "llama_rope_llama3"), tmp_path / "model.gguf"
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    factors = []
    for exponent in range(0, 16, 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-exponent / 16) / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / (keep + (1 - keep) / rope["factor"]))
    weights = write_gguf(path, source, "F32", vectors={"rope_freqs.weight": factors})
    torch.testing.assert_close(logits(path), reference_logits(source, weights), **TIGHT)
    write_gguf(path, source, "F32")
    assert not torch.allclose(logits(path), reference_logits(source, weights), **TIGHT)
    write_gguf(path, source, "F32", vectors={"rope_freqs.weight": factors[:-1]})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight: has 7 numbers, 8 are expected"):
        logits(path)


def test_random_weights_need_the_metadata_alone(sources, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, sources["llama"], "Q8_0")
    assert not torch.equal(logits(path, load_format="dummy"), logits(path))


def test_a_model_in_several_files_is_one(sources, tmp_path):
    import gguf

    whole, source = tmp_path / "whole.gguf", sources["qwen3_tied"]
    write_gguf(whole, source, "Q8_0")
    reader = gguf.GGUFReader(whole)
    first, second = (tmp_path / f"part-0000{number}-of-00002.gguf" for number in (1, 2))
    write_gguf(first, source, "Q8_0", changes={"split.count": 2, "split.no": 0})
    # All tensors are in the first one as well: leave out half of them there.
    half = {tensor.name for tensor in reader.tensors[::2]}
    _keep(first, half, {"split.count": 2})
    _keep(second, {tensor.name for tensor in reader.tensors} - half, {"split.count": 2}, whole)
    assert torch.equal(logits(first), logits(whole))
    with pytest.raises(ModelError, match="not the first of its 2 files"):
        ModelFacts.read(second)
    shutil.move(second, tmp_path / "elsewhere")
    first.touch()
    with pytest.raises(ModelError, match=r"part-00002-of-00002\.gguf .* is missing"):
        ModelFacts.read(first)


def _keep(path, names, changes, source=None):
    """Write a file again with these tensors alone."""
    import gguf

    reader = gguf.GGUFReader(source or path)
    tensors = [(own.name, own.data.copy(), own.tensor_type) for own in reader.tensors if own.name in names]
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    del reader
    architecture = fields.pop("general.architecture")
    writer = gguf.GGUFWriter(path, architecture)
    from tests.support.gguf_checkpoints import _add

    for key, value in (fields | changes).items():
        _add(writer, key, value)
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_is_missing_is_named(sources, tmp_path):
    path, smaller = tmp_path / "model.gguf", tmp_path / "smaller.gguf"
    write_gguf(path, sources["llama"], "Q8_0")
    import gguf

    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors} - {"blk.1.attn_k.weight"}
    _keep(smaller, names, {}, path)
    with pytest.raises(ModelError, match=r"lacks 1 .* model\.layers\.1\.self_attn\.qkv_proj\.weight \(k\)"):
        load_model(worker_config(smaller))


def test_a_shape_that_does_not_fit_is_named(sources, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, sources["llama"], "Q8_0", changes={"llama.feed_forward_length": 512})
    with pytest.raises(ModelError, match=r"mlp\.\w+_proj\.weight: \[256, 256\] in the checkpoint, \["):
        load_model(worker_config(path))
