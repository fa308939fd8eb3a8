"""What `quire plan` says about weights is what they weigh when they are loaded."""

import pytest
from tests.support import quantized_checkpoints as writers
from tests.support.gguf_checkpoints import write_gguf

from quire.config import ModelFacts
from quire.config.arithmetic import ModelShape
from quire.config.gguf_file import GGUFFile
from quire.config.weight_sizes import weight_bytes
from quire.errors import OptionError
from quire.interfaces.cli.bench_limits import ModelCost
from quire.interfaces.cli.program import main
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.kernels import cpu
from quire.worker.model_loader import load_model

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
FORMATS = {
    "gptq": (writers.write_gptq, {"group": 128}),
    "awq": (writers.write_awq, {"group": 64}),
    "int8": (writers.write_compressed_int8, {}),
    "packed": (writers.write_compressed_packed, {"group": 32}),
    "fp8": (writers.write_fp8, {"block": (128, 128)}),
}


@pytest.fixture(scope="module", params=["llama", "llama_tied"])
def source(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **SIZES)


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


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("name", FORMATS)
def test_of_a_quantised_checkpoint(name, scheme, source, tmp_path):
    write, arguments = FORMATS[name]
    write(tmp_path, source, **arguments)
    check(tmp_path, scheme)


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_of_a_gguf_file(kind, scheme, source, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model.gguf", source, kind)
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
