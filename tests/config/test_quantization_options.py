"""The options `quantization` and `load_format`, and what a path may be."""

import json

import pytest
from tests.support.gguf_checkpoints import write_gguf

from quire.config import EngineOptions, ModelFacts, resolve
from quire.config.model_source import embedded_path, locate
from quire.config.quantization import FORMATS, SCHEMES, resolve_quantization
from quire.errors import ModelError, OptionError
from quire.testing.tiny_checkpoints import make_checkpoint


def config_of(method):
    return {"quantization_config": {"quant_method": method}} if method else {}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_taken_as_asked(name):
    assert resolve_quantization(name, {}) == (name, (name, "as asked"))
    assert resolve_quantization(name.upper().replace("_", "-"), {})[0] == name
    config, reasons = resolve(EngineOptions(quantization=name, device="cpu"))
    assert config.worker.quantization == name
    assert ("quantization", name, "as asked") in reasons.rows


def test_without_the_option_weights_stay_as_they_are():
    assert resolve_quantization(None, {}) == (None, (None, "as stored in the checkpoint"))
    assert resolve_quantization(None, config_of("awq")) == (None, (None, "the checkpoint comes as awq"))
    assert resolve(EngineOptions(device="cpu"))[0].worker.quantization is None


@pytest.mark.parametrize("name", FORMATS)
def test_the_name_of_the_checkpoints_own_format_says_nothing_new(name):
    assert resolve_quantization(name, config_of(name))[0] is None


@pytest.mark.parametrize(
    ("name", "method"), [("gptq_marlin", "gptq"), ("awq_marlin", "awq"), ("compressed_tensors", "compressed-tensors")]
)
def test_names_of_other_engines_for_the_same_format(name, method):
    assert resolve_quantization(name, config_of(method))[0] is None


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("awq", None, "is a format of checkpoints, and this one is not quantised"),
        ("awq", "gptq", "is a format of checkpoints, and this one is quantised as gptq"),
        ("fp8", None, 'Did you mean "int8"'),
        ("bitsandbytes", None, 'Did you mean "int4_weight_only"'),
        ("w8a8", None, 'Did you mean "int8"'),
        ("int88", None, 'must be one of int8.* Did you mean "int8"'),
        ("int3", None, "must be one of int8, int8_weight_only, int4, int4_weight_only"),
    ],
)
def test_other_names_are_errors_that_help(name, method, message):
    with pytest.raises(OptionError, match=message):
        resolve_quantization(name, config_of(method))


def test_a_scheme_of_another_package_is_known_by_its_name(monkeypatch):
    from quire.config import quantization

    class Point:
        name = "thirds"

    monkeypatch.setattr(quantization, "entry_points", lambda group: [Point] if group == "quire.quantization" else [])
    assert resolve_quantization("thirds", {})[0] == "thirds"


def test_a_declaration_must_be_an_object(tmp_path):
    config = json.loads((embedded_path() / "config.json").read_text()) | {"quantization_config": "int4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantization_config must be a JSON object"):
        resolve(EngineOptions(model=str(tmp_path), device="cpu"))


# ---- paths ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("gguf")
    path = folder / "tiny-q8_0.gguf"
    write_gguf(path, make_checkpoint(folder / "plain", "llama", num_hidden_layers=1), "Q8_0")
    return path


def link(folder, *names, to):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).symlink_to(to)
    return folder


def test_a_file_and_a_folder_that_holds_one(gguf_file, tmp_path):
    assert locate(str(gguf_file)) == gguf_file
    folder = link(tmp_path / "one", "model.gguf", "mmproj-model.gguf", to=gguf_file)
    assert locate(str(folder)).name == "model.gguf"
    parts = link(tmp_path / "parts", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf", to=gguf_file)
    assert locate(str(parts)).name == "m-00001-of-00002.gguf"
    several = link(tmp_path / "several", "m-Q4_0.gguf", "m-Q8_0.gguf", to=gguf_file)
    with pytest.raises(ModelError, match=r"holds 2 models in GGUF \(m-Q4_0\.gguf, m-Q8_0\.gguf\)\. Give the path"):
        locate(str(several))
    assert resolve(EngineOptions(model=str(folder), device="cpu"))[0].facts.model_type == "llama"


def test_load_format_decides_where_both_are(gguf_file, tmp_path):
    both = make_checkpoint(tmp_path / "both", "qwen2", num_hidden_layers=1)
    link(both, "model.gguf", to=gguf_file)
    assert locate(str(both)) == both
    assert locate(str(both), load_format="safetensors") == both
    assert locate(str(both), load_format="gguf").name == "model.gguf"
    config, _ = resolve(EngineOptions(model=str(both), load_format="gguf", device="cpu"))
    assert (config.facts.model_type, config.worker.load_format) == ("llama", "gguf")
    plain = make_checkpoint(tmp_path / "plain", "qwen2", num_hidden_layers=1)
    with pytest.raises(ModelError, match="no GGUF file there"):
        locate(str(plain), load_format="gguf")
    with pytest.raises(ModelError, match=r"load_format=safetensors: tiny-q8_0\.gguf is a GGUF file"):
        locate(str(gguf_file), load_format="safetensors")


def test_what_is_no_gguf_is_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGML....")
    with pytest.raises(ModelError, match=r"x\.gguf: does not begin as a GGUF file does"):
        locate(str(tmp_path / "x.gguf"))
    with pytest.raises(ModelError, match="no such directory"):
        locate(str(tmp_path / "absent.gguf"))


def test_a_kind_of_file_may_follow_a_hub_name(gguf_file, tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}

    def download(repository, revision, allow_patterns):
        asked.update(repository=repository, patterns=allow_patterns)
        return str(link(tmp_path / "hub", "m-Q4_0.gguf", "m-Q8_0.gguf", to=gguf_file))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("someone/model-GGUF:q8_0").name == "m-Q8_0.gguf"
    assert asked == {"repository": "someone/model-GGUF", "patterns": ["*q8_0*.gguf", "*Q8_0*.gguf"]}


def test_activations_of_a_quantised_file_are_bfloat16_on_a_cpu(gguf_file):
    assert ModelFacts.read(gguf_file).dtype == "float16"
    assert resolve(EngineOptions(model=str(gguf_file), device="cpu"))[0].worker.dtype == "bfloat16"


def test_engines_share_keys_and_values_only_if_their_weights_are_alike():
    alike, plain, other = (
        resolve(EngineOptions(device="cpu", quantization=name))[0].worker.model_as_run
        for name in ("int8", None, "int4")
    )
    assert len({alike, plain, other}) == 3
    assert alike == resolve(EngineOptions(device="cpu", quantization="int8"))[0].worker.model_as_run
