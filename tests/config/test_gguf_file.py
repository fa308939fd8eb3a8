"""The head of a GGUF file: the same as the package gguf reads, and one clear line for whatever is damaged."""

import contextlib
import random
import struct
from pathlib import Path

import pytest
from tests.support.gguf_checkpoints import write_gguf

from quire.config import ModelFacts
from quire.config.gguf_file import TYPES, GGUFFile
from quire.errors import ModelError
from quire.testing.tiny_checkpoints import make_checkpoint

gguf = pytest.importorskip("gguf")
TOKENS = [f"token {number} é" for number in range(1000)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "llama", num_hidden_layers=1)


@pytest.fixture
def path(source, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(
        path, source, "Q8_0", changes={"test.tokens": TOKENS, "test.scores": [0.5, -1.0] * 400, "test.flag": True}
    )
    return path


def test_metadata_and_places_are_those_of_the_package(path):
    file, reader = GGUFFile.read(path), gguf.GGUFReader(path)
    for name, field in reader.fields.items():
        if name.startswith("GGUF."):
            continue
        expected = field.contents()
        assert (file.array(name) if isinstance(expected, list) else file.metadata[name]) == expected
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        found = file.tensors[tensor.name]
        assert (found.offset, found.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.type_name == tensor.tensor_type.name


def test_every_type_has_the_sizes_of_the_package():
    for kind, (per_block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name not in ("Q8_1", "Q8_K"):  # of activations, never stored
            assert TYPES[int(kind)] == (kind.name, per_block, size)


def test_a_file_is_read_once_until_it_changes(path):
    assert GGUFFile.read(path) is GGUFFile.read(path)
    first = GGUFFile.read(path)
    path.write_bytes(path.read_bytes() + bytes(32))
    assert GGUFFile.read(path) is not first


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.02, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_named(share, path):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"model\.gguf: damaged or cut off"):
        GGUFFile.read(path)


def test_random_damage_never_ends_in_another_error(path):
    data = path.read_bytes()
    rng = random.Random(0)
    length = GGUFFile.read(path).tensors["token_embd.weight"].offset
    for number in range(300):
        damaged = bytearray(data[: length + 4096])
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(length)] = rng.randrange(256)
        damaged[4:8] = struct.pack("<I", 3)
        other = path.with_name(f"{number}.gguf")
        other.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            ModelFacts.read(other)


@pytest.mark.parametrize(("version", "message"), [(1, "version 1 is not read"), (4, "version 4"), (3 << 24, "little")])
def test_other_versions_are_named(version, message, path):
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", version)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        GGUFFile.read(path)


def head(*, sizes=(32, 4), kind=8, offset=0, count=1):
    """A file with one tensor and no keys."""
    name = b"x"
    tensor = struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return b"GGUF" + struct.pack("<IQQ", 3, count, 0) + tensor * count + bytes(512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": (2**40, 2**40)}, "x would end at byte"),
        ({"sizes": (2**63, 2**62, 2**61, 2**60)}, "x would end at byte"),
        ({"sizes": (33, 4)}, "blocks of 32"),
        ({"sizes": (0, 4)}, "sizes"),
        ({"sizes": (1, 1, 1, 1, 1)}, "5 dimensions"),
        ({"kind": 999}, "type number 999, which is not known"),
        ({"offset": 2**60}, "x would end at byte"),
        ({"offset": 3}, "x would end at byte"),
        ({"count": 2}, "names a tensor twice"),
        ({"count": 2**60}, "damaged"),
    ],
)
def test_sizes_are_not_believed(changes, message, tmp_path):
    path = tmp_path / "x.gguf"
    if changes.get("count", 1) > 10:
        data = bytearray(head())
        data[8:16] = struct.pack("<Q", changes["count"])
        path.write_bytes(data)
    else:
        path.write_bytes(head(**changes))
    with pytest.raises(ModelError, match=message):
        GGUFFile.read(path)


def test_a_long_text_is_not_believed(tmp_path):
    path = tmp_path / "x.gguf"
    for length in (2**63, 2**64 - 1, 4096):
        path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length) + b"key")
        with pytest.raises(ModelError, match="damaged"):
            GGUFFile.read(path)
    for length in (2**62, 600):
        array = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, length)
        path.write_bytes(array + struct.pack("<Q", 2**63) + bytes(64))
        with pytest.raises(ModelError, match="damaged"):
            GGUFFile.read(path)


# ---- what config.json would say -------------------------------------------------------------------------------------


def facts_with(source, tmp_path, changes, **options):
    path = tmp_path / "model.gguf"
    write_gguf(path, source, "Q8_0", changes=changes, **options)
    return ModelFacts.read(path)


def test_facts_are_those_of_the_plain_checkpoint(source, path):
    plain, found = ModelFacts.read(source), ModelFacts.read(path)
    for name in ("model_type", "architecture", "vocab_size", "max_model_len", "eos_token_ids"):
        assert getattr(found, name) == getattr(plain, name)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"):
        assert found.hf_config[key] == plain.hf_config[key]
    assert found.hf_config["rms_norm_eps"] == pytest.approx(plain.hf_config["rms_norm_eps"])
    assert not found.hf_config["tie_word_embeddings"]
    assert found.config_file == path
    assert found.num_weight_bytes < path.stat().st_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": None, "llama.block_count": None}, "no llama.block_count"),
        ({"llama.attention.head_count": 0}, "head_count=0 must be a whole number"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv"),
        ({"llama.expert_count": 8}, "no llama.expert_used_count there"),
        ({"llama.logit_scale": 0.5}, "logit_scale=0.5 is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "scaling.type=longrope is not supported, only linear and yarn"),
        ({"llama.attention.value_length": 8}, "different lengths"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "rms_epsilon=small must be a number above 0"),
        ({"llama.attention.layer_norm_rms_epsilon": [1.0, 2.0]}, "must be a number above 0"),
        ({"llama.attention.sliding_window": [1, 2]}, "sliding_window=.* must be a whole number"),
        ({"llama.rope.freq_base": -1.0}, "freq_base=-1.0 must be a number above 0"),
        ({"llama.rope.scale_linear": 4.0}, "scale_linear=4.0 is not supported"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_beta_fast": "fast"}, "yarn_beta_fast=fast must"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor=2.0 is not supported"),
        ({"llama.block_count": 2**31 - 1}, "block_count=2147483647, but it has 12 tensors"),
        ({"general.architecture": ["llama"]}, r"general\.architecture=\['llama'\] is not among"),
    ],
)
def test_settings_that_are_not_read_are_named(changes, message, source, tmp_path):
    with pytest.raises(ModelError, match=message):
        facts_with(source, tmp_path, changes)


def test_rotations_are_read(source, tmp_path):
    changes = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    changes |= {"llama.rope.scaling.original_context_length": 64, "llama.rope.scaling.yarn_beta_fast": 16.0}
    rope = facts_with(source, tmp_path, changes).hf_config["rope_parameters"]
    assert rope == {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
    }


def test_both_ends_of_a_chat_model_end_an_answer(source, tmp_path):
    assert facts_with(source, tmp_path, {"tokenizer.ggml.eot_token_id": 258}).eos_token_ids == (256, 258)


def test_an_unknown_architecture_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"general\.architecture='rwkv6' is not among llama, qwen2, qwen3"):
        ModelFacts.read(Path(path))
