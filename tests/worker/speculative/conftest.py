"""Checkpoints of targets and drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.testing.tiny_checkpoints import make_checkpoint


@dataclass
class Checkpoints:
    """A target, a copy of it under another name, a smaller model, and a target with windows."""

    target: Path
    copy: Path
    small: Path
    windowed: Path


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    path = tmp_path_factory.mktemp("speculative")
    return Checkpoints(
        target=make_checkpoint(path / "target", "llama"),
        copy=make_checkpoint(path / "copy", "llama"),
        small=make_checkpoint(path / "small", "qwen3", seed=5, num_hidden_layers=1, hidden_size=32, vocab_size=352),
        windowed=make_checkpoint(path / "windowed", "qwen2_window"),
    )
