import json
import logging
from concurrent.futures import ThreadPoolExecutor
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.resident_peak import resident_peak
from torch import nn
from torch.overrides import TorchFunctionMode

from quire.errors import ModelError, OptionError
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.source_checkpoints import make_source_checkpoint, make_source_model
from quire.testing.tiny_checkpoints import make_checkpoint, shape_0_6b_config
from quire.worker.attention import attention_layers
from quire.worker.model_loader import building, load_model

PROMPT = [7, 99, 3, 250, 18, 6]


@pytest.fixture
def path(tmp_path):
    return make_checkpoint(tmp_path, "llama")


def weights_of(path):
    return load_file(path / "model.safetensors")


def write(path, weights):
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def logits(path, **options):
    return ModelHarness(load_model(worker_config(path, **options))).run(0, PROMPT)


def set_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# ---- layouts of a checkpoint ----------------------------------------------------------------------------------------


def test_shards_and_one_file_are_the_same_model(path):
    expected = logits(path)
    weights = weights_of(path)
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(path), expected)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors"):
        load_model(worker_config(path))


def test_an_index_that_leaves_the_directory_is_refused(path):
    index = {"weight_map": {"model.norm.weight": "../../model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="same directory"):
        load_model(worker_config(path))


def test_old_spellings_of_the_configuration_are_read(path):
    config = json.loads((path / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    expected_differs = logits(path)
    (path / "config.json").write_text(json.dumps(config))
    old = logits(path)
    config.pop("rope_scaling")
    (path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(path), expected_differs)
    assert not torch.allclose(old, expected_differs, atol=1e-3)


def test_types_are_converted_while_loading(path):
    expected = logits(path, dtype="bfloat16")
    write(path, {name: tensor.bfloat16() for name, tensor in weights_of(path).items()})
    assert torch.equal(logits(path, dtype="bfloat16"), expected)
    model = load_model(worker_config(path, dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert next(iter(attention_layers(model).values())).spec.bytes_per_element == 2


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_tied_head_may_be_stored_as_well_or_instead(quantization, tmp_path):
    path = make_checkpoint(tmp_path, "llama_tied")
    weights = weights_of(path)
    assert HEAD not in weights
    expected = logits(path, quantization=quantization)
    embedding = weights[EMBEDDING]
    # once more, or what is the same in the model's type
    for head in (embedding.clone(), embedding.double() * (1 + 1e-12)):
        write(path, {**weights, HEAD: head})
        model = load_model(worker_config(path, quantization=quantization))
        assert model.lm_head.is_tied
        assert torch.equal(ModelHarness(model).run(0, PROMPT), expected)
    del weights[EMBEDDING]
    write(path, {**weights, HEAD: embedding.clone()})
    assert torch.equal(logits(path, quantization=quantization), expected)


def other_head(path):
    """A head that differs from the embedding in one number."""
    weights = weights_of(path)
    head = weights[EMBEDDING].clone()
    head[200, 3] += 0.5
    return weights, head


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_head_that_differs_is_used_though_it_is_said_to_be_tied(quantization, is_first, tmp_path, caplog):
    """As Transformers does it, and to the bit as if config.json told the truth."""
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path, "llama_tied")
    weights, head = other_head(path)
    (path / "model.safetensors").unlink()
    files = [{HEAD: head}, weights] if is_first else [weights, {HEAD: head}]
    file_by_name = {}
    for number, tensors in enumerate(files, 1):
        file = path / f"model-{number:05}-of-00002.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        file_by_name |= dict.fromkeys(tensors, file.name)
    index = {"metadata": {}, "weight_map": file_by_name}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING, logger="quire"):
        found = logits(path, quantization=quantization)
    assert "tie_word_embeddings=true, but lm_head.weight and model.embed_tokens.weight of the checkpoint" in caplog.text
    if quantization is None:
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(found, theirs(torch.tensor([PROMPT])).logits[0], atol=1e-4, rtol=1e-4)
    set_config(path, tie_word_embeddings=False)
    assert torch.equal(found, logits(path, quantization=quantization))


def test_a_tied_head_of_another_shape_or_broken_is_named(tmp_path):
    path = make_checkpoint(tmp_path, "llama_tied")
    weights, head = other_head(path)
    write(path, {**weights, HEAD: head[:-1].contiguous()})
    with pytest.raises(ModelError, match=r"lm_head\.weight: \[\d+, 64\] in the checkpoint"):
        load_model(worker_config(path))
    write(path, {**weights, HEAD: head.fill_(float("nan"))})
    with pytest.raises(ModelError, match=r"lm_head\.weight: holds infinities or NaN"):
        load_model(worker_config(path))


def test_t5_as_transformers_saves_it(tmp_path):
    """It says of every T5 that its head is tied, and stores one that is not."""
    published = load_model(worker_config(make_source_checkpoint(tmp_path / "published", "t5 v1.1"), max_model_len=64))
    make_source_model("t5 v1.1").save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is True
    saved = load_model(worker_config(tmp_path / "saved", max_model_len=64))
    assert not saved.lm_head.is_tied
    assert saved.model.scale == published.model.scale == 1.0
    hidden = torch.randn(3, 64)
    assert torch.equal(saved.compute_logits(hidden), published.compute_logits(hidden))


SHARED, OF_ENCODER, OF_DECODER = "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"


@pytest.mark.parametrize("kind", ["t5", "t5 v1.1"])
def test_t5_has_one_embedding_by_any_of_its_names(kind, tmp_path):
    path = make_source_checkpoint(tmp_path / "model", kind)
    options = {"max_model_len": 64}
    expected = load_model(worker_config(path, **options)).model.embed_tokens(torch.arange(50))
    weights = weights_of(path)
    shared = weights.pop(SHARED)
    for names in ([OF_ENCODER], [OF_DECODER, OF_ENCODER], [SHARED, OF_DECODER, OF_ENCODER]):
        write(path, {**weights, **{name: shared.clone() for name in names}})
        assert torch.equal(load_model(worker_config(path, **options)).model.embed_tokens(torch.arange(50)), expected)


@pytest.mark.parametrize("kind", ["t5", "t5 v1.1"])
@pytest.mark.parametrize("name", [OF_ENCODER, OF_DECODER])
def test_t5_with_two_embeddings_is_refused(name, kind, tmp_path):
    """Transformers uses both; to take one for the other would be another model."""
    from transformers import AutoModelForSeq2SeqLM

    path = make_source_checkpoint(tmp_path / "model", kind)
    weights = weights_of(path)
    other = weights[SHARED] + 1
    write(path, {**weights, name: other})
    theirs = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32).state_dict()
    assert torch.equal(theirs[name], other)
    assert torch.equal(theirs[SHARED], weights[SHARED])
    with pytest.raises(
        ModelError, match=f"({name}|{SHARED}): differs from ({SHARED}|{name}), and Quire has one weight"
    ):
        load_model(worker_config(path, max_model_len=64))


def test_what_is_no_weight_is_passed_over(path):
    expected = logits(path)
    write(path, {**weights_of(path), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert torch.equal(logits(path), expected)


# ---- damage and misfits ---------------------------------------------------------------------------------------------


def test_missing_weights_are_named(path):
    weights = weights_of(path)
    del weights["model.layers.1.self_attn.k_proj.weight"], weights["model.norm.weight"]
    write(path, weights)
    with pytest.raises(ModelError) as caught:
        load_model(worker_config(path))
    text = str(caught.value)
    assert "lacks 2" in text
    assert "model.layers.1.self_attn.qkv_proj.weight (k)" in text
    assert "model.norm.weight" in text


def test_unexpected_weights_are_named(path):
    write(path, {**weights_of(path), "model.layers.9.mlp.up_proj.weight": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"model\.layers\.9\.mlp\.up_proj\.weight"):
        load_model(worker_config(path))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_wrong_shape_is_named_with_both_shapes(name, path):
    weights = weights_of(path)
    whole = list(weights[name].shape)
    weights[name] = weights[name][:-1].contiguous()
    write(path, weights)
    with pytest.raises(ModelError) as caught:
        load_model(worker_config(path))
    assert all(text in str(caught.value) for text in (name, str(whole), str([whole[0] - 1, whole[1]])))


def test_quantised_tensors_need_their_scales_and_a_known_format(path):
    weights = weights_of(path)
    name = "model.layers.0.mlp.up_proj.weight"
    write(path, {**weights, name: weights[name].to(torch.int8)})
    with pytest.raises(ModelError, match=r"up_proj.*int8.*quantised"):
        load_model(worker_config(path))
    set_config(path, quantization_config={"quant_method": "exl3"})
    with pytest.raises(ModelError, match="exl3"):
        load_model(worker_config(path))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_named(number, path):
    weights = weights_of(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name][3, 5] = number
    write(path, weights)
    with pytest.raises(ModelError, match=f"{name}: holds infinities or NaN"):
        load_model(worker_config(path))


@pytest.mark.parametrize("keep", [4, 100, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_named(keep, path):
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged or cut off"):
        load_model(worker_config(path))


def test_a_corrupt_header_is_named(path):
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(bytes(data))
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged"):
        load_model(worker_config(path))


def test_pickled_weights_are_never_read(path):
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*pickles.*load_format=pt.*safetensors"):
        load_model(worker_config(path))
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="load_format=dummy"):
        load_model(worker_config(path))


def as_pickle(path):
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    return tensors


def test_bin_files_are_read_where_they_are_asked_for(path, tmp_path):
    expected = ModelHarness(load_model(worker_config(path))).run(0, PROMPT)
    tensors = as_pickle(path)
    torch.save(tensors, path / "pytorch_model.bin")
    for impl in ("native", "transformers"):
        found = ModelHarness(load_model(worker_config(path, load_format="pt", model_impl=impl))).run(0, PROMPT)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    # in parts, in the layout of old versions, and beside what a trainer left
    (path / "pytorch_model.bin").unlink()
    names = list(tensors)
    parts = {"a.bin": names[::2], "b.bin": names[1::2]}
    for file, part in parts.items():
        some = {name: tensors[name] for name in part}
        torch.save(some, path / file, _use_new_zipfile_serialization=False)
    torch.save({"step": 3}, path / "training_args.bin")
    assert torch.equal(ModelHarness(load_model(worker_config(path, load_format="pt"))).run(0, PROMPT), expected)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "b.bin").unlink()
    with pytest.raises(ModelError, match=r"b\.bin named by pytorch_model\.bin\.index\.json is missing"):
        load_model(worker_config(path, load_format="pt"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"weight": [1, 2]}, "something other than tensors"),
        ({5: torch.zeros(2)}, "something other than tensors"),
        ({"weight": torch.zeros(2, device="meta")}, "plain ones"),
        ({"weight": torch.zeros(2, 2).to_sparse()}, "plain ones"),
        (None, "cannot be read as tensors"),
    ],
    ids=["a list", "a number as name", "no numbers", "sparse", "no pickle"],
)
def test_bin_files_that_hold_anything_else_are_refused(content, words, path):
    as_pickle(path)
    file = path / "pytorch_model.bin"
    if content is None:
        file.write_bytes(b"no pickle")
    else:
        torch.save(content, file)
    with pytest.raises(ModelError, match=words):
        load_model(worker_config(path, load_format="pt"))


def test_a_bin_file_that_would_grow_in_memory_is_refused(path):
    tensors = as_pickle(path)
    torch.save(tensors, path / "plain")
    with ZipFile(path / "plain") as plain, ZipFile(path / "pytorch_model.bin", "w", ZIP_DEFLATED) as compressed:
        for entry in plain.infolist():
            compressed.writestr(entry.filename, plain.read(entry))
    with pytest.raises(ModelError, match="is compressed"):
        load_model(worker_config(path, load_format="pt"))


def test_a_download_that_ended_early_is_named(path):
    (path / "model.safetensors").rename(path / "model-00002-of-00003.safetensors")
    with pytest.raises(ModelError, match=r"2 of 3 files are missing, such as model-00001-of-00003\.safetensors"):
        load_model(worker_config(path))


def test_a_pointer_of_git_lfs_is_no_file(path):
    (path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        load_model(worker_config(path))


def test_a_configuration_that_makes_no_sense_is_named(path):
    set_config(path, num_attention_heads="four")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(worker_config(path))


def test_options_that_do_not_exist_are_named(path):
    with pytest.raises(OptionError, match="reference"):
        load_model(worker_config(path, attention_backend="flash"))
    with pytest.raises(OptionError, match="float32"):
        load_model(worker_config(path, dtype="int4"))


# ---- random weights, packing, memory --------------------------------------------------------------------------------


def test_random_weights_depend_on_the_seed_alone(tmp_path):
    shape_0_6b_config(tmp_path, num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=300)
    first, again, other = (logits(tmp_path, load_format="dummy", seed=seed, dtype="float32") for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.std() > 0
    weight = load_model(worker_config(tmp_path, load_format="dummy")).model.embed_tokens(torch.arange(300))
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_packing_replaces_weights_and_changes_nothing(path, monkeypatch):
    from quire.worker.layers import packing

    model = load_model(worker_config(path))
    if model.model.layers[0].mlp.down_proj.packed is None:
        pytest.skip("no kernels in C++ here")
    assert model.model.layers[0].mlp.down_proj.weight.numel() == 0
    packed = logits(path)
    monkeypatch.setattr(packing.cpu, "load", lambda: False)
    plain = load_model(worker_config(path))
    assert plain.model.layers[0].mlp.down_proj.packed is None
    torch.testing.assert_close(packed, logits(path), atol=1e-5, rtol=1e-5)


def test_the_peak_is_the_weights_and_a_part_of_a_file(tmp_path):
    """Not the weights twice: neither a second copy nor the whole file mapped into memory."""
    load_model(worker_config(make_checkpoint(tmp_path / "small", "llama")))  # imports, operators
    path = make_checkpoint(tmp_path / "large", "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=6)
    size = (path / "model.safetensors").stat().st_size
    assert size > 350 * 2**20
    with resident_peak() as peak:
        model = load_model(worker_config(path))
    assert peak.num_bytes < size + 120 * 2**20
    del model


def test_what_was_loaded_is_logged(path, caplog):
    with caplog.at_level(logging.INFO, logger="quire"):
        load_model(worker_config(path))
    assert "llama runs as LlamaForCausalLM on torch.float32 with attention backend reference" in caplog.text


@pytest.mark.parametrize(
    ("name", "are_all"), [("llama", True), ("stablelm", True), ("mixtral", True), ("gpt_oss", True), ("gpt_oss", False)]
)
def test_what_quantization_leaves_as_it_is_is_logged(name, are_all, tmp_path, caplog):
    checkpoint = make_checkpoint(tmp_path, name)
    impl = "auto" if are_all else "transformers"
    with caplog.at_level(logging.INFO, logger="quire"):
        model = load_model(worker_config(checkpoint, quantization="int8", model_impl=impl))
    if are_all:
        assert "with weights as int8" in caplog.text
        ours = [record for record in caplog.records if record.name.startswith("quire")]
        assert not [record for record in ours if record.levelno >= logging.WARNING]
        return
    share = round(100 * model.share_not_quantized())
    assert 20 < share < 100
    assert f"quantization=int8: {share} % of the weights stay as they are." in caplog.text
    assert f"with {100 - share} % of its weights as int8" in caplog.text


def test_the_original_files_of_gpt2_and_opt_hold_the_backbone_alone(tmp_path):
    for name, prefix, extra in (
        ("gpt2", "transformer.", {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}),
        ("opt", "model.", {}),
    ):
        path = make_checkpoint(tmp_path / name, name)
        expected = logits(path)
        weights = {key.removeprefix(prefix): tensor for key, tensor in weights_of(path).items()}
        assert all(not key.startswith(prefix) for key in weights)
        write(path, {**weights, **extra})
        assert torch.equal(logits(path), expected)


# ---- while a model is built -----------------------------------------------------------------------------------------


def layers():
    """PyTorch's own, of the kinds that initialise what they make."""
    return nn.ModuleList([nn.Linear(9, 7), nn.Embedding(9, 7), nn.LayerNorm(7), nn.Conv2d(3, 5, 2)])


class Calls(TorchFunctionMode):
    """Names of what PyTorch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_initialised_while_a_model_is_built():
    """Neither with random numbers, nor with ones; what is no parameter is."""
    with Calls() as calls, building(torch.bfloat16, torch.device("cpu")):
        made = layers()
        assert "empty" in calls.names
        assert not {"kaiming_uniform_", "uniform_", "normal_", "fill_", "zero_"}.intersection(calls.names)
        assert torch.zeros(3).fill_(2.0).tolist() == [2.0] * 3
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}


def test_other_threads_initialise_their_layers_meanwhile():
    torch.manual_seed(5)
    expected = layers().state_dict()
    torch.manual_seed(5)
    with building(torch.float32, torch.device("cpu")), ThreadPoolExecutor(1) as other:
        made = other.submit(layers).result().state_dict()
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name
