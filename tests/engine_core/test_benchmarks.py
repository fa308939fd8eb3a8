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


@pytest.mark.parametrize("name", ["defaults", "engine_overhead", "front_end", "policies", "streams"])
def test_runs_as_a_script_from_the_root(name):
    # outside of pytest, which puts the root with tests/ where modules are looked for
    variables = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent / "src")}
    command = [sys.executable, f"benchmarks/{name}.py", "--help"]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_defaults_beside_tuned_settings(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import defaults

    monkeypatch.setattr(defaults, "_CHOICES", {"max_num_batched_tokens": (64,), "block_size": (8, 16)})
    own = {"max_num_seqs": 8, "scheduling_policy": "fifo", "enable_prefix_caching": True, "preemption_mode": "auto"}
    declared = {"max_num_batched_tokens": 2048, "block_size": 16}
    monkeypatch.setattr(defaults, "defaults", lambda: {**own, **declared})
    chain = defaults.Call([1, 2, 3], 4, results=([5], [6, 7]))
    load = defaults.Load("agents", [(0.0, chain), (1.0, chain)], longest=128)
    costs = defaults.LinearCosts(per_step=0.01, per_token=0.001)
    outcome = defaults.run(load, defaults.defaults(), costs)
    assert len(outcome.latencies) == 6, "two agents of three calls each"
    tried = list(defaults.tuned(load, costs))
    assert [changes for changes, _ in tried][:3] == [{}, {"max_num_batched_tokens": 64}, {"block_size": 8}]
    assert all(score > 1.0 for _, score in tried)


def test_what_better_settings_bring_is_put_together(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import defaults

    gains = {"max_num_batched_tokens": {512: 2.0, 1024: 1.0}, "block_size": {32: 0.5}}

    def measure(load, settings, costs):
        gain = sum(values.get(settings[name], 0.0) for name, values in gains.items())
        return defaults.Outcome(10.0 - gain)

    tried = list(defaults.tuned(defaults.Load("any", []), defaults.LinearCosts(), measure))
    assert tried[0] == ({}, 10.0)
    assert tried[-1] == ({"max_num_batched_tokens": 512, "block_size": 32}, 7.5)
