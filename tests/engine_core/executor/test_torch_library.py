"""Torch's library is loaded early where a worker will need it, and nowhere else."""

import logging
import sys
from types import SimpleNamespace

import pytest

from quire.config.rank_grid import RankGrid
from quire.engine_core import process
from quire.engine_core.executor.torch_library import load_torch_library


@pytest.mark.parametrize(
    ("grid", "core", "is_loaded"),
    [(RankGrid(), None, True), (RankGrid(tensor=2), None, False), (RankGrid(), "somebody:core", False)],
)
def test_a_core_without_a_worker_needs_none(monkeypatch, grid, core, is_loaded):
    targets = []

    class Thread:
        def __init__(self, target, **how):
            targets.append(target)

        def start(self): ...

    document = SimpleNamespace(
        config=SimpleNamespace(worker=SimpleNamespace(grid=grid)),
        folder="",
        log_level=logging.getLogger("quire").level,
    )
    monkeypatch.setattr(process, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(process, "read_document", lambda file, kind: document)
    monkeypatch.setattr(process, "watch_parent", lambda folder: None)
    monkeypatch.setattr(process, "run", lambda *arguments: 7)
    monkeypatch.setattr(process.os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=None))
    monkeypatch.setattr(sys, "argv", ["core", *(["--core", core] if core else [])])
    with pytest.raises(SystemExit, match="7"):
        process.main()
    assert targets == [load_torch_library] * is_loaded
