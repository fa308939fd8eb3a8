"""The benchmarks that run the core on the simulated executor still do, in small; scripts find what they import."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def result_of(monkeypatch, capsys):
    """What a benchmark prints last."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name: str, *arguments: str):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        importlib.import_module(name).main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_sharing(result_of):
    rows = result_of("sharing", "--requests", "3")["rows"]
    assert len(rows) == 12
    assert all(0 < row["saved_percent"] < 100 for row in rows)


def test_recovery(result_of):
    [row] = result_of("recovery", "--quick", "--only", "chat, blocks of 64")["recovery"]
    modes = row["modes"]
    assert (modes["recompute"]["by_swap"], modes["swap"]["recomputed_tokens"]) == (0, 0)
    assert modes["auto"]["preemptions"] > 0


@pytest.mark.parametrize("name", ["engine_overhead", "front_end", "policies", "streams"])
def test_runs_as_a_script_from_the_root(name):
    # outside of pytest, which puts the root with tests/ where modules are looked for
    variables = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent / "src")}
    command = [sys.executable, f"benchmarks/{name}.py", "--help"]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
