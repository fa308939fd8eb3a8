"""Adapter directories: what PEFT writes is understood, and whatever is broken or not built is refused in one line."""

import json
import os
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file

from quire.errors import ModelError
from quire.testing.model_harness import worker_config
from quire.testing.tiny_adapters import make_adapter, write_adapter
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.adapter_files import AdapterTargets, read_adapter
from quire.worker.adapter_slots import Adapters, attach
from quire.worker.model_loader import load_model
from quire.worker.tensor_file import TensorFile


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    base = make_checkpoint(folder / "base", "llama")
    model = load_model(worker_config(base))
    attach(model, 2, 8, torch.float32)
    return base, AdapterTargets.of(model, 8, torch.float32)


@pytest.fixture
def good(house, tmp_path):
    base, _ = house
    path = make_adapter(tmp_path / "adapter", base, seed=0, rank=4)
    config = json.loads((path / "adapter_config.json").read_text())
    return path, config, load_file(path / "adapter_model.safetensors")


def first(tensors, side="A"):
    return next(key for key in tensors if f"q_proj.lora_{side}" in key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora=True: is not built"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.* is not built"),
        ({"bias": "all"}, "bias=all: is not built"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=.*pissa.* is not built"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"r": 0}, "r=0: must be a number above 0"),
        ({"r": "4"}, "r=4: must be a number"),
        ({"r": True}, "r=True"),
        ({"lora_alpha": float("inf")}, "is not valid JSON"),
        ({"r": 9}, "rank 9 of .*: at most 8 here. Start with max_lora_rank=9"),
        ({"r": 5}, "do not have the rank 5"),
        ({"rank_pattern": {"(a+)+$": 4}}, "only names of modules"),
        ({"rank_pattern": {"q_proj": 3}}, "do not have the rank 3"),
        ({"rank_pattern": [1]}, "rank_pattern=.* must be an object"),
        ({"use_rslora": "yes"}, "use_rslora=yes"),
        ({"target_modules": ["q_proj", "fc9"]}, "has nothing for fc9"),
        ({"target_modules": 7}, "target_modules=7"),
        # minutes of comparing them with the modules, on the threads of the steps
        ({"target_modules": ["q_proj"] * 5000}, "target_modules: 5,000 names, at most 4,096"),
        ({"alpha_pattern": {f"n{index}": 1 for index in range(5000)}}, "alpha_pattern: 5,000 names, at most 4,096"),
    ],
)
def test_configurations_that_are_refused(house, good, change, words):
    path, config, tensors = good
    write_adapter(path, {**config, **change}, tensors)
    with pytest.raises(ModelError, match=words) as caught:
        read_adapter(path, house[1])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(first(t)), "has one of lora_A and lora_B"),
        (lambda t: t.update({first(t): torch.zeros(4, 63)}), "the model needs"),
        (lambda t: t.update({first(t, "B"): torch.zeros(63, 4)}), "the model needs"),
        (lambda t: t.update({first(t): torch.zeros(4, 64, dtype=torch.int32)}), "must be a matrix of F32"),
        (lambda t: t.update({first(t): torch.zeros(4)}), "must be a matrix"),
        (lambda t: t.update({first(t): torch.full((4, 64), float("nan"))}), "not finite"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(3)}), "only lora_A and lora_B"),
        (lambda t: t.update({first(t).replace("lora_A", "lora_magnitude_vector"): torch.zeros(3)}), "only lora_A"),
        (
            lambda t: t.update({f"base_model.model.lm_head.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}),
            "no linear layer of this model",
        ),
        (
            lambda t: t.update({f"x.{'y' * 5000}.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}),
            "no linear layer of this model",
        ),
        (
            lambda t: t.update({f"model.x.{index}.q_proj.lora_A.weight": torch.zeros(1) for index in range(99)}),
            "tensors; no adapter of this model has more than 84",
        ),
        (lambda t: t.update({first(t).removeprefix("base_model.model."): torch.zeros(4, 64)}), "is there twice"),
        # all three projections in one, beside each of them
        (
            lambda t: t.update(
                {
                    first(t).replace("q_proj", "qkv_proj"): torch.zeros(4, 64),
                    first(t, "B").replace("q_proj", "qkv_proj"): torch.zeros(128, 4),
                }
            ),
            "is the same part of the model as another",
        ),
        # a scale of 8 / 4
        (lambda t: t.update({first(t, "B"): torch.full((64, 4), 3e38)}), "not finite, or not when they are scaled"),
        (lambda t: t.clear(), "holds no tensors|has nothing"),
    ],
)
def test_tensors_that_are_refused(house, good, change, words):
    path, config, tensors = good
    change(tensors)
    write_adapter(path, config, tensors)
    with pytest.raises(ModelError, match=words) as caught:
        read_adapter(path, house[1])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_files_that_are_broken(house, good):
    path, config, _ = good
    weights = path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for data in (b"", b"\xff" * 64, whole[:100], whole[:-10], b"\x10\x00\x00\x00\x00\x00\x00\x00not a header ...."):
        weights.write_bytes(data)
        with pytest.raises(ModelError, match="cannot be read"):
            read_adapter(path, house[1])
    weights.unlink()
    (path / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ModelError, match="safetensors"):
        read_adapter(path, house[1])
    settings = path / "adapter_config.json"
    for data in (b"", b"[" * 100_000, b"\xff\xfe", b"[]", b"null", b" " * (2 << 20)):
        settings.write_bytes(data)
        with pytest.raises(ModelError):
            read_adapter(path, house[1])
    settings.unlink()
    os.mkfifo(settings)
    with pytest.raises(ModelError, match="is not there"):
        read_adapter(path, house[1])
    assert config


def test_a_file_that_claims_to_be_huge_costs_no_memory(house, good):
    """Sizes are looked at before anything is read: the file has holes where its gigabytes are said to be."""
    path, _, tensors = good
    num_bytes = 1 << 34
    header = json.dumps({
        key: {"dtype": "F32", "shape": [4, num_bytes // 16], "data_offsets": [n * num_bytes, (n + 1) * num_bytes]}
        for n, key in enumerate([first(tensors), first(tensors, "B")])
    }).encode()  # fmt: skip
    with (path / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * num_bytes)
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": ["q_proj"]}))
    tracemalloc.start()
    with pytest.raises(ModelError, match="bytes; an adapter of this model has at most"):
        read_adapter(path, house[1])
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_file_that_is_written_anew_changes_nothing_that_was_read(house, good):
    """A training job saves over its last version; a mapped file that became short would end the process."""
    path, *_ = good
    weights = read_adapter(path, house[1])
    before = {(name, part): pair.a.clone() for name, parts in weights.items() for part, pair in parts.items()}
    file = path / "adapter_model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert before
    for (name, part), a in before.items():
        torch.testing.assert_close(weights[name][part].a, a, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda file: os.truncate(file, 3000), "became shorter"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "was written while it was read"),
    ],
)
def test_a_file_that_is_written_while_it_is_read_is_refused(house, good, monkeypatch, write, words):
    """Of a file that is mapped, what became shorter would end the process."""
    path, *_ = good
    file = path / "adapter_model.safetensors"
    os.utime(file, (1, 1))
    of_file = TensorFile.tensor
    num_read = 0

    def tensor(opened, name):
        nonlocal num_read
        num_read += 1
        if num_read == 2:
            write(file)
        return of_file(opened, name) if "shorter" in words else torch.zeros(opened.shape(name))

    monkeypatch.setattr(TensorFile, "tensor", tensor)
    with pytest.raises(ModelError, match=words) as caught:
        read_adapter(path, house[1])
    assert "\n" not in str(caught.value)


def test_what_takes_the_place_of_a_file_is_not_waited_for(house, good):
    """Opening a pipe waits for whoever writes into it, and two that wait would keep all others from coming."""
    path, *_ = good
    file = path / "adapter_model.safetensors"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ModelError, match="is not there"):
        read_adapter(path, house[1])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"data_offsets": [0, 4]}, "another size than its shape says"),
        ({"data_offsets": [-1024, 0]}, "another size"),
        ({"data_offsets": [0, 2**70]}, "header is not valid|another size"),
        ({"shape": [-4, 64]}, "negative|do not have the rank"),
        ({"shape": 4}, "header is not valid"),
    ],
)
def test_headers_that_lie(house, good, entry, words):
    path, *_ = good
    file = path / "adapter_model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = first(header)
    header[name] |= entry
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    with pytest.raises(ModelError, match=words) as caught:
        read_adapter(path, house[1])
    assert "\n" not in str(caught.value)


def test_what_peft_itself_writes(house, tmp_path):
    """Rank, alpha, rsLoRA, patterns, target modules: the merged weights of PEFT are those that we add up to."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base, targets = house
    for number, options in enumerate([
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "lora_alpha": 5},
        {"target_modules": r".*\.[01]\..*\.(v|o)_proj", "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    ]):  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
        wrapped = peft.get_peft_model(model, config)
        wrapped.save_pretrained(tmp_path / str(number))
        after = wrapped.merge_and_unload().state_dict()
        weights = read_adapter(tmp_path / str(number), targets)
        num_found = 0
        for layer in range(3):
            for module, index, names in (
                ("self_attn.qkv_proj", 0, ("q_proj", "k_proj", "v_proj")),
                ("self_attn.o_proj", 0, ("o_proj",)),
                ("mlp.gate_up_proj", 0, ("gate_proj", "up_proj")),
                ("mlp.down_proj", 0, ("down_proj",)),
            ):
                pieces = weights.get(f"model.layers.{layer}.{module}", {})
                for part, name in enumerate(names, index):
                    key = f"model.layers.{layer}.{module.partition('.')[0]}.{name}.weight"
                    delta = after[key] - before[key]
                    found = pieces[part].b @ pieces[part].a if part in pieces else torch.zeros_like(delta)
                    torch.testing.assert_close(found, delta, atol=1e-5, rtol=1e-4)
                    num_found += part in pieces
        assert num_found == {0: 21, 1: 6, 2: 4}[number]


def test_what_latent_vectors_go_through_takes_no_adapter(tmp_path):
    """It is multiplied in another direction, so that what an adapter adds to it would be lost without a word."""
    model = load_model(worker_config(make_checkpoint(tmp_path / "base", "deepseek_v2")))
    attach(model, 2, 8, torch.float32)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["kv_b_proj"]}
    name = "base_model.model.model.layers.0.self_attn.kv_b_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.zeros(4, 32), name.format("B"): torch.zeros(160, 4)}
    write_adapter(tmp_path / "adapter", config, tensors)
    with pytest.raises(ModelError, match="no linear layer of this model"):
        read_adapter(tmp_path / "adapter", AdapterTargets.of(model, 8, torch.float32))


def test_a_model_of_the_transformers_library_is_refused_by_name():
    with pytest.raises(ModelError, match=r"Linear runs through the Transformers library.*model_impl=native"):
        attach(torch.nn.Linear(2, 2), 1, 8, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_of_the_greatest_rank_takes_what_was_set_aside_for_it(house, tmp_path, dtype):
    base, _ = house
    model = load_model(worker_config(base, dtype=str(dtype).removeprefix("torch.")))
    slot_bytes = attach(model, 2, 8, dtype)
    adapters = Adapters(model, 2, 8, dtype, slot_bytes=slot_bytes)
    for number in (1, 2, 3):
        adapters.load(number, str(make_adapter(tmp_path / f"a{number}", base, seed=number, rank=8)))
        while adapters.state(number)["state"] == "loading":
            adapters.wait(number)
    assert adapters.most_bytes(3) == (2 * slot_bytes, 5 * slot_bytes), "two may be read at a time"
    assert adapters.statistics()["adapter_bytes"] == (2 + 3) * slot_bytes
    adapters.evict(2)
    assert adapters.statistics()["adapter_bytes"] == (2 + 2) * slot_bytes
    small = make_adapter(tmp_path / "small", base, seed=4, rank=2, targets=("q_proj",))
    adapters.load(4, str(small))
    while adapters.state(4)["state"] == "loading":
        adapters.wait(4)
    assert 0 < adapters.statistics()["adapter_bytes"] - 4 * slot_bytes < slot_bytes / 4
