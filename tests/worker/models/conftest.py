"""Checkpoints are made once a run; most tests only read them."""

from pathlib import Path

import pytest
import torch

from quire.testing.tiny_checkpoints import CheckpointMaker, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> CheckpointMaker:
    """checkpoint(name) -> directory of a tiny checkpoint of this architecture."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """Longer than two sliding windows of 24."""
    return torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(7)).tolist()
