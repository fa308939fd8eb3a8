"""Values laid over config.json: one folder that everybody reads, and the model's own files as they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineOptions, resolve
from quire.config import overrides as overrides_module
from quire.config.overrides import keys_added_by, laid_over, overridden
from quire.errors import ModelError, OptionError
from quire.testing.fake_engine import write_byte_checkpoint
from quire.testing.tiny_checkpoints import make_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 5e5}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # of these folders alone: kernels stay where they are
    monkeypatch.setattr(overrides_module, "cache_folder", lambda: tmp_path / "cache")


def model_in(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_byte_checkpoint(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "overrides", "result"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "c": 4}, {"a": 1, "b": 3, "c": 4}),
        # a part of a model keeps its other values, another object is replaced
        ({"text_config": {"a": 1, "b": 2}}, {"text_config": {"b": 3}}, {"text_config": {"a": 1, "b": 3}}),
        ({"quantization_config": {"a": 1}}, {"quantization_config": {"b": 2}}, {"quantization_config": {"b": 2}}),
        ({"text_config": None}, {"text_config": {"b": 3}}, {"text_config": {"b": 3}}),
        # of three spellings one is left
        ({"rope_theta": 7.0, "rope_scaling": None}, {"rope_parameters": YARN}, {"rope_parameters": YARN}),
        ({"rope_theta": 7}, {"rope_scaling": {"type": "yarn"}}, {"rope_parameters": {"rope_theta": 7, "type": "yarn"}}),
        ({"rope_parameters": YARN}, {"rope_theta": 7.0}, {"rope_parameters": {**YARN, "rope_theta": 7.0}}),
        ({"rope_scaling": YARN, "rope_theta": 7}, {"rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5}}),
    ],
)  # fmt: skip
def test_what_is_laid_over(config: dict[str, Any], overrides: dict[str, Any], result: dict[str, Any]) -> None:
    assert laid_over(config, overrides) == result


def test_the_folder_is_the_model_but_for_its_config(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    before = (model / "config.json").read_bytes()
    folder = overridden(model, {"vocab_size": 999})
    assert json.loads((folder / "config.json").read_text()) == {**json.loads(before), "vocab_size": 999}
    others = {entry.name for entry in model.iterdir()} - {"config.json"}
    assert {entry.name for entry in folder.iterdir() if entry.resolve().parent == model.resolve()} == others
    assert (model / "config.json").read_bytes() == before
    # a second engine finds the same one, other values have another
    assert overridden(model, {"vocab_size": 999}) == folder
    assert overridden(model, {"vocab_size": 998}) != folder
    assert [overridden(model, nothing) for nothing in ({}, None)] == [model, model]


def test_facts_come_from_the_values_laid_over(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    options = EngineOptions(model=str(model), device="cpu", hf_overrides={"architectures": ["OtherModel"]})
    config, reasons = resolve(options)
    assert config.facts.architecture == "OtherModel"
    # it is called what it was called
    assert config.served_model_names == (str(model),)
    assert ("hf_overrides", str(options.hf_overrides), "as asked") in reasons.rows


def test_positions_stretch_as_yarn_says(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    config, _ = resolve(EngineOptions(model=str(model), device="cpu", hf_overrides={"rope_parameters": YARN}))
    assert config.max_model_len == 4096


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        ({"vocab_size": -1}, ModelError, r"hf_overrides/.*vocab_size=-1 must be"),
        ({"architectures": "LlamaForCausalLM"}, ModelError, "architectures must be a list of names"),
        ({"a": {1, 2}}, OptionError, "must hold what JSON can say"),
        ({"rope_parameters": 5}, OptionError, "^hf_overrides: rope_parameters=5: must be an object"),
        ({1: 2}, OptionError, "hf_overrides: 1: a name must be a text"),
        ("[1]", OptionError, "must be a JSON object"),
        (lambda config: config, OptionError, "must be a JSON object"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, overrides: Any, error: type[Exception], says: str) -> None:
    model = model_in(tmp_path)
    with pytest.raises(error, match=says) as refused:
        resolve(EngineOptions(model=str(model), device="cpu", hf_overrides=overrides))
    assert "\n" not in str(refused.value)


def test_angles_by_kinds_of_layers_have_no_common_base() -> None:
    with pytest.raises(OptionError, match="by kinds of layers"):
        laid_over({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, {"rope_theta": 2.0})


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_in(tmp_path)
    monkeypatch.setattr(overrides_module, "cache_folder", lambda: model / "config.json")
    with pytest.raises(OptionError, match="Set QUIRE_CACHE_DIR"):
        overridden(model, {"a": 1})


@pytest.mark.parametrize(
    ("overrides", "added"),
    [
        ({"vocab_size": 3, "model_type": "llama"}, ()),
        ({"vocab_sise": 3}, ("vocab_sise",)),
        ({"vision_config": {"depth": 2}}, ("vision_config", "vision_config.depth")),
        ({"quantization_config": {"bits": 4}}, ("quantization_config",)),
        (None, ()),
    ],
)
def test_keys_that_the_file_does_not_have(tmp_path: Path, overrides: Any, added: tuple[str, ...]) -> None:
    model = model_in(tmp_path)
    assert keys_added_by(model, overrides) == added
    options = EngineOptions(model=str(model), device="cpu", hf_overrides=overrides)
    assert resolve(options)[0].worker.added_config_keys == added


def test_a_part_keeps_the_keys_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"head_dim": 3}}')
    overrides = {"text_config": {"head_dim": 4, "head_dimm": 4}}
    assert keys_added_by(tmp_path, overrides) == ("text_config.head_dimm",)


@pytest.fixture
def forgets() -> Iterator[Callable[[], None]]:
    """As a program does that ends."""

    def forget() -> None:
        while overrides_module._locked:
            os.close(overrides_module._locked.popitem()[1])

    yield forget
    forget()


def test_folders_that_nobody_uses_are_bounded(tmp_path: Path, forgets: Callable[[], None]) -> None:
    model = model_in(tmp_path)
    root = tmp_path / "cache" / "hf_overrides"
    root.mkdir(parents=True, mode=0o700)
    # what somebody else has put there, and what a program left that was killed
    (root / "notes").mkdir()
    (root / "abandoned.part").mkdir()
    with_a_file = overridden(model, {"vocab_size": 500})
    (with_a_file / "thoughts.txt").write_text("mine")
    forgets()
    before = {entry.name for entry in model.iterdir()}
    old = [overridden(model, {"vocab_size": 600 + number}) for number in range(20)]
    for number, folder in enumerate([with_a_file, *old]):
        os.utime(folder, (number, number))
    assert all(folder.is_dir() for folder in old), "a program that runs has them all"
    forgets()
    newest = overridden(model, {"vocab_size": 700})
    assert [folder.is_dir() for folder in old] == [False] * 4 + [True] * 16
    assert newest.is_dir()
    assert (with_a_file / "thoughts.txt").read_text() == "mine"
    assert (with_a_file / "config.json").is_file()
    assert (root / "notes").is_dir()
    assert not (root / "abandoned.part").exists()
    assert {entry.name for entry in model.iterdir()} == before
    assert all(entry.stat().st_size for entry in model.iterdir() if entry.is_file())


def test_one_that_another_program_uses_stays(tmp_path: Path, forgets: Callable[[], None]) -> None:
    model = model_in(tmp_path)
    folders = [overridden(model, {"vocab_size": 600 + number}) for number in range(20)]
    for number, folder in enumerate(folders):
        os.utime(folder, (number, number))
    forgets()
    program = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_SH); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(folders[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        overridden(model, {"vocab_size": 700})
        other.communicate(b"\n")
    assert [folder.is_dir() for folder in folders] == [True] + [False] * 3 + [True] * 16


def test_a_program_that_uses_many_gives_up_the_first(
    tmp_path: Path, forgets: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overrides_module, "_MOST_LOCKED", 3)
    monkeypatch.setattr(overrides_module, "_MOST_UNUSED", 0)
    model = model_in(tmp_path)
    folders = [overridden(model, {"vocab_size": 600 + number}) for number in range(5)]
    assert [folder.is_dir() for folder in folders] == [False, False, True, True, True]


def test_a_gguf_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(OptionError, match="GGUF file"):
        overridden(tmp_path / "model.gguf", {"a": 1})


def test_a_misspelt_key_ends_the_start(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(
        OptionError, match=r"hf_overrides: max_positon_embeddings: .* mean \"max_position_embeddings\"\?"
    ):
        LLM(str(model), hf_overrides={"max_positon_embeddings": 77})


def test_tokens_are_those_of_a_checkpoint_with_these_values(tmp_path: Path) -> None:
    """The engine, and what it reads, know only the values laid over."""
    model = make_checkpoint(tmp_path / "model", "llama")
    written = tmp_path / "written"
    written.mkdir()
    overrides = {"rope_theta": 37.0, "max_position_embeddings": 77}
    for entry in model.iterdir():
        (written / entry.name).symlink_to(entry)
    (written / "config.json").unlink()
    (written / "config.json").write_text(
        json.dumps(laid_over(json.loads((model / "config.json").read_text()), overrides))
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    common: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 16, "num_threads": 1}
    tokens = []
    for path, options in ((model, {}), (written, {}), (model, {"hf_overrides": overrides})):
        with LLM(str(path), **common, **options) as llm:
            (answer,) = llm.generate([{"prompt_token_ids": list(range(5, 40))}], sampling)
            tokens.append((answer.outputs[0].token_ids, llm.config.max_model_len))
    assert tokens[2] == tokens[1] != tokens[0]
