"""What tells a model's weights from others: what is in them, and neither their place nor when they were written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import EngineOptions, resolve
from quire.config.weights_fingerprint import weights_fingerprint
from quire.testing.tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def fingerprint(path: Path, load_format: str = "auto", seed: int = 0) -> str:
    return weights_fingerprint(path, load_format=load_format, seed=seed)


def test_place_and_time_do_not_count(model: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(model, copied)
    for path in copied.iterdir():
        os.utime(path, (1, 1))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"transformers_version": "1.2.3"}))
    assert fingerprint(copied) == fingerprint(model)


@pytest.mark.parametrize("part", range(0, 20, 6))
def test_every_tensor_counts(model: Path, tmp_path: Path, part: int) -> None:
    copied = tmp_path / "changed"
    shutil.copytree(model, copied)
    (path,) = copied.glob("*.safetensors")
    tensors = load_file(path)
    name = sorted(tensors)[part % len(tensors)]
    tensors[name] = tensors[name] + 0.01 * torch.ones_like(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    assert fingerprint(copied) != fingerprint(model)


def test_the_configuration_counts(model: Path, tmp_path: Path) -> None:
    copied = tmp_path / "configured"
    shutil.copytree(model, copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert fingerprint(copied) != fingerprint(model)


def test_random_weights_are_told_by_what_they_are_made_from(model: Path) -> None:
    found = {fingerprint(model, "dummy", seed) for seed in (0, 1)} | {fingerprint(model)}
    assert len(found) == 3
    assert fingerprint(model, "dummy", 1) in found


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn", "llama3"])
def test_angles_that_a_start_chooses_by_its_longest_sequence_count(model: Path, tmp_path: Path, kind: str) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(model, copied)
    config = json.loads((copied / "config.json").read_text())
    config["rope_scaling"] = {"type": kind, "factor": 4.0} | ({"long_factor": [2.0]} if kind == "yarn" else {})
    (copied / "config.json").write_text(json.dumps(config))
    short, long, plain = (
        resolve(EngineOptions(model=str(copied), device="cpu", max_model_len=length, kv_store="host"))[0]
        for length in (32, 64, 64)
    )
    assert (short.worker.model_as_run != long.worker.model_as_run) == (kind != "llama3")
    assert long.worker.model_as_run == plain.worker.model_as_run


def test_a_name_that_is_a_digest_stands_for_the_content(tmp_path: Path) -> None:
    digest = "ab" * 32
    (tmp_path / digest).write_bytes(b"content that nobody reads")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / digest)
    before = fingerprint(tmp_path / "model")
    (tmp_path / digest).write_bytes(b"still nobody")
    assert fingerprint(tmp_path / "model") == before


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(100_000))
    before = fingerprint(path)
    path.write_bytes(bytes(99_999) + b"\x01")
    assert fingerprint(path) != before
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    assert fingerprint(tmp_path / "broken.safetensors") != before
