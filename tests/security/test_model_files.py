"""Files of models that were made to hurt: a clean error, no code of theirs, no crash (SEC-04, 05, 07)."""

import json
import random
import struct
import sys

import pytest

from quire.config import EngineOptions, ModelFacts, resolve
from quire.errors import ModelError, UserError
from quire.renderer import Renderer
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.testing.tiny_encoders import make_encoder
from quire.worker.model_loader import load_model

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "head_dim",
)  # fmt: skip
WRONG = (0, -1, 1.5, 3, "64", [], {}, True, 2**31, 2**63, 10**30, float("nan"))
OTHERS = {
    "model_type": ["", "../../etc/passwd", "__init__", "os", 5, None, [], "a" * 5000, "llama\x00"],
    "architectures": ["x", [5], {}, ["../x"], [None]],
    "rms_norm_eps": ["x", None, [], -1, float("inf")],
    "hidden_act": ["nothing", 5, None, "__import__"],
    "rope_parameters": [5, "x", [], {"rope_type": "x"}, {"rope_type": "yarn"}, {"rope_theta": "x"}, {"rope_theta": -1}],
    "rope_scaling": [5, "x", {"type": "linear"}, {"rope_type": "llama3", "factor": 0}],
    "torch_dtype": ["x", 5, "float8", []],
    "dtype": ["x", 5, "complex64"],
    "tie_word_embeddings": ["x", 5, []],
    "eos_token_id": ["x", -1, 2**40, [[1]], {}],
    "bos_token_id": ["x", 2**40],
    "quantization_config": [5, "x", [], {"quant_method": "x"}, {"quant_method": 5}, {"quant_method": "gptq"}],
    "sliding_window": ["x", -1, 0],
    "layer_types": ["x", [5], ["full_attention"], ["none"] * 3],
    "attention_bias": ["x", 5],
}
CONFIGS = [(name, value) for name in SIZES for value in WRONG] + [
    (n, v) for n, values in OTHERS.items() for v in values
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source"), "llama")


@pytest.fixture
def folder(source, tmp_path):
    """A copy that may be changed: links, but for what a test writes anew."""
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def rewrite(file, data: bytes):
    file.unlink(missing_ok=True)
    file.write_bytes(data)


def change_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    rewrite(folder / "config.json", json.dumps({**config, **values}).encode())


def load_all(folder):
    """What a start does with a model's files, short of running it. A size that memory has no room for is not tried."""
    config, _ = resolve(EngineOptions(model=str(folder), device="cpu", dtype="float32"))
    load_model(config.worker)
    Renderer.from_config(config)


def check(folder):
    """It loads, or a user's error says in a line what is wrong."""
    try:
        load_all(folder)
    except UserError as error:
        said = str(error)
    else:
        said = ""
    assert len(said) < 2000
    assert "\n" not in said


@pytest.mark.parametrize(("name", "value"), CONFIGS, ids=lambda value: repr(value)[:24])
def test_configurations(folder, name, value):
    change_config(folder, **{name: value})
    check(folder)


NUMBERS = {
    "max_position_embeddings": [10**9, 0, -5, 1.5],
    "rms_norm_eps": [-1, 2, float("nan"), float("inf")],
    "rope_theta": [-5, 0, float("inf"), 1e30],
    "rope_parameters": [{"rope_theta": -5}, {"rope_theta": 1e4, "rope_type": "linear", "factor": 0}],
    "rope_scaling": [{"rope_type": "yarn", "factor": -4}, {"rope_type": "linear", "factor": float("nan")}],
    "partial_rotary_factor": [-1, 5],
    "hidden_size": [10**9, 0],
    "intermediate_size": [2**40],
    "num_hidden_layers": [10**6, -1],
    "num_attention_heads": [10**6, 0],
    "num_key_value_heads": [0],
    "vocab_size": [2**31],
    "head_dim": [2**40, 10**7, 0],
    # tables of rotary angles: gigabytes before a weight is looked at
    "qk_rope_head_dim": [10**7, -1],
    "linear_num_key_heads": [0],
    "linear_num_value_heads": [0],
    "linear_key_head_dim": [0, 10**7],
    "linear_conv_kernel_dim": [0, 10**7],
    "conv_L_cache": [0, 10**7],
    "conv_kernel": [0, 10**7],
    "num_heads": [0, 10**7],
    "n_groups": [0],
    "state_size": [0, 10**7],
    "full_attention_interval": [0, -1],
    # layer by layer until memory ends, or a slope for each
    "n_layers": [10**6, 0],
    "n_heads": [10**9, 0],
    "num_labels": [10**9, -1],
    "type_vocab_size": [10**9, -1],
    "mamba_d_conv": [0, 10**7],
    "mamba_d_state": [0, 10**7],
    "ssm_state_size": [10**7],
    "mamba_expand": [0, 10**6],
    "expand": [0, 10**6],
    "attn_layer_period": [0],
    "ffn_hidden_size": [2**40],
    "interleave_moe_layer_step": [0, -1],
    "attention_chunk_size": [0, -1],
    "floor_scale": [0, float("nan")],
    "attn_scale": [float("inf")],
    "swiglu_limit": [0.0, float("nan")],
    "routed_scaling_factor": [0, -1, 1e30],
    "block_multiple_of": [0],
    "sliding_window": [-1, 2**62],
    "attn_logit_softcapping": [-50.0],
    "text_config": [{"rms_norm_eps": -1}, {"max_position_embeddings": 10**9}, {"rope_parameters": {"rope_theta": -5}}],
}
# of which a model takes the first and the second in every step, long after it was loaded
STRANGE_LIMITS = ([], [0], [1, 2, 3], [5, 1], [-1, 1], [float("nan"), 1], "64", {}, [None, 1], [{"__float__": "x"}, 1])
NO_MODEL_HAS = [(name, value) for name, values in NUMBERS.items() for value in values]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        # each loaded, and then no step could be computed
        ("deepseek_v3", {"topk_group": 0}, "from 0 of 1 groups"),
        ("deepseek_v3", {"topk_group": 7}, "from 7 of 1 groups"),
        ("deepseek_v3", {"n_group": 3, "topk_group": 1}, "1 of 3 groups"),
        ("deepseek_v3_groups", {"num_experts_per_tok": 7}, "7 experts for a token from 2 of 4 groups"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok=0 must|0 of 4 experts"),
        # this one was computed with full attention
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, "layer_types.0.=chunked_attention: must be"),
    ],
)
def test_numbers_that_do_not_go_together(tmp_path, name, changes, words):
    path = make_checkpoint(tmp_path, name)
    change_config(path, **changes)
    with pytest.raises(ModelError, match=words):
        load_model(worker_config(path))


@pytest.mark.parametrize("kinds", [["mamba"] * 20_000, {"mamba": 1}, 5], ids=["many", "an object", "a number"])
def test_layers_that_are_named_one_by_one_have_a_limit_too(tmp_path, kinds):
    path = make_checkpoint(tmp_path, "nemotron_h")
    change_config(path, layers_block_type=kinds)
    with pytest.raises(ModelError, match=r"layers?_(block_type|types)=.* must be"):
        load_model(worker_config(path))


def test_positions_behind_a_padding_token_that_leaves_none_are_refused(tmp_path):
    path = make_encoder(tmp_path, "roberta")
    change_config(path, pad_token_id=10**9)
    with pytest.raises(ModelError, match=r"pad_token_id=1000000000: .*leaves none"):
        load_model(worker_config(path))


@pytest.mark.parametrize("limit", STRANGE_LIMITS, ids=repr)
def test_limits_of_a_time_step_are_two_numbers_or_refused(tmp_path, limit):
    path = make_checkpoint(tmp_path, "mamba2")
    change_config(path, time_step_limit=limit)
    with pytest.raises(ModelError, match=r"time_step_limit=.* must be two numbers"):
        load_model(worker_config(path))


@pytest.mark.parametrize(("name", "value"), NO_MODEL_HAS, ids=lambda value: repr(value)[:40])
def test_a_number_that_no_model_has_is_refused_by_its_name(folder, name, value):
    """Before anything is made of it: no tables of gigabytes, and no model that answers NaN to everybody."""
    change_config(folder, **{name: value})
    inner = list(value)[-1] if isinstance(value, dict) else name
    with pytest.raises(ModelError, match=rf"config\.json: .*({inner}|rope_theta).* must be .* Correct"):
        ModelFacts.read(folder)


LONG_NUMBER = b"1" * 100_000


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_number_of_many_digits_is_refused(folder, name):
    content = (folder / name).read_bytes().rstrip()
    rewrite(folder / name, content[:-1] + b', "extra": ' + LONG_NUMBER + b"}")
    read = ModelFacts.read if name.startswith(("config", "generation")) else Renderer.from_folder
    with pytest.raises(ModelError, match=name):
        read(folder)


@pytest.mark.parametrize("value", [5, [1], {"x": {}}, {"1": 5}, {"1": None}, {"9" * 5000: {}}])
def test_tokens_that_are_declared_wrongly(folder, value):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    rewrite(folder / "tokenizer_config.json", json.dumps({**config, "added_tokens_decoder": value}).encode())
    with pytest.raises(ModelError, match="added_tokens_decoder"):
        Renderer.from_folder(folder)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"5", b"\xff\xfe", b"{" * 100_000, b'{"a": ' * 50_000, b"\x80\x04K\x01."]
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_files_that_are_no_json(folder, name, data):
    rewrite(folder / name, data)
    check(folder)


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header, rest):
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + rest


HEADERS = {
    "negative size": lambda one: {**one, "shape": [-1, *one["shape"][1:]]},
    "huge size": lambda one: {**one, "shape": [2**62, 2**62]},
    "no sizes": lambda one: {**one, "shape": []},
    "sizes that are texts": lambda one: {**one, "shape": ["64", "64"]},
    "fractions": lambda one: {**one, "shape": [1.5, 2]},
    "another type": lambda one: {**one, "dtype": "I8"},
    "an unknown type": lambda one: {**one, "dtype": "Q7"},
    "a type that is a number": lambda one: {**one, "dtype": 5},
    "backwards": lambda one: {**one, "data_offsets": one["data_offsets"][::-1]},
    "behind the end": lambda one: {**one, "data_offsets": [2**40, 2**41]},
    "negative place": lambda one: {**one, "data_offsets": [-8, 8]},
    "place of another": lambda one: {**one, "data_offsets": [0, one["data_offsets"][1] - one["data_offsets"][0]]},
    "no place": lambda one: {"dtype": one["dtype"], "shape": one["shape"]},
    "one number": lambda one: {**one, "data_offsets": [0]},
    "a text": lambda one: "x",
    "null": lambda one: None,
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_of_weights(folder, kind):
    header, rest = header_of((folder / "model.safetensors").read_bytes())
    name = next(name for name in header if name.endswith("q_proj.weight"))
    rewrite(folder / "model.safetensors", with_header({**header, name: HEADERS[kind](header[name])}, rest))
    check(folder)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**63, 2**64 - 1])
def test_lengths_of_headers(folder, length):
    data = (folder / "model.safetensors").read_bytes()
    rewrite(folder / "model.safetensors", struct.pack("<Q", length) + data[8:])
    check(folder)


@pytest.mark.parametrize("seed", range(60))
def test_flipped_bits(folder, seed):
    chosen = random.Random(seed)
    name = chosen.choice(["model.safetensors", "tokenizer.json", "config.json"])
    data = bytearray((folder / name).read_bytes())
    # in weights nothing can be told from a flipped bit, so those of the header are taken
    size = min(len(data), 4000)
    for _ in range(chosen.randint(1, 20)):
        data[chosen.randrange(size)] ^= 1 << chosen.randrange(8)
    rewrite(folder / name, bytes(data))
    check(folder)


CODE = "import pathlib; pathlib.Path({canary!r}).touch()\n"


def test_code_beside_a_model_is_never_imported(folder, tmp_path):
    canary = tmp_path / "ran"
    modules = ("configuration_x", "modeling_x", "tokenization_x", "processing_x", "generate")
    for module in modules:
        (folder / f"{module}.py").write_text(CODE.format(canary=str(canary)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE.format(canary=str(canary)))
    auto_map = {
        "AutoConfig": "configuration_x.XConfig",
        "AutoModelForCausalLM": "modeling_x.XModel",
        "AutoTokenizer": ["tokenization_x.XTokenizer", None],
        "AutoProcessor": "processing_x.XProcessor",
    }
    for model_type in ("llama", "x"):
        change_config(folder, auto_map=auto_map, model_type=model_type, text_config={"auto_map": auto_map})
        tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
        rewrite(folder / "tokenizer_config.json", json.dumps({**tokenizer_config, "auto_map": auto_map}).encode())
        check(folder)
    assert not canary.exists()
    files = [str(getattr(module, "__file__", "")) for module in sys.modules.values()]
    assert not [file for file in files if file.startswith(str(folder)) or "transformers_modules" in file]


def test_pickles_are_not_opened(folder, tmp_path):
    import torch

    class Canary:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"model.embed_tokens.weight": Canary()}, folder / "pytorch_model.bin")
    check(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="pickle"):
        load_model(worker_config(folder))
    with pytest.raises(UserError, match="cannot be read as tensors alone"):
        load_model(worker_config(folder, load_format="pt"))
    assert not (tmp_path / "ran").exists()
