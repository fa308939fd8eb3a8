"""`make gpu-check` on a machine without a GPU: it goes on where it was, and all of its units run in small."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_check
from benchmarks.gpu_check import Record, UnitError, check

ROOT = Path(__file__).parents[4]
SETTINGS = {"device": "cpu", "is_small": True}


class Units:
    """Units that have two entries each, and what was asked of them. A unit may end in the middle."""

    def __init__(self, **breaks):
        self.breaks = breaks
        self.asked = []

    def __call__(self, unit, known, seconds):
        self.asked.append((unit, known))
        for name in ("first", "second"):
            if name == "second" and unit in self.breaks:
                raise self.breaks[unit]
            if name not in known:
                yield name, {"microseconds": 1.5}


def record_at(path, **options):
    return Record.at(path / "check.json", SETTINGS, is_anew=False, **options)


def test_without_a_gpu_it_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "out")])
    assert gpu_check.main() == 2
    said = capsys.readouterr().err
    assert torch.__version__ in said
    assert 'ARGS="--device cpu --small"' in said
    assert not list(tmp_path.iterdir())


def test_a_call_that_was_ended_is_gone_on_with(tmp_path):
    clock = iter(range(100)).__next__
    assert not check(record_at(tmp_path), ["build", "kernels"], Units(kernels=TimeoutError()), 50, clock)
    units = Units()
    record = record_at(tmp_path)
    assert record.wrong == []
    assert check(record, ["build", "kernels"], units, 50, clock)
    assert units.asked == [("kernels", ["first"])]
    assert json.loads(record.path.read_text())["finished"] == ["build", "kernels"]


def test_seconds_that_are_over_leave_units_for_the_next_call(tmp_path):
    units = Units()
    assert not check(record_at(tmp_path), ["build", "kernels"], units, 2, iter([0, 1, 3]).__next__)
    assert [unit for unit, _ in units.asked] == ["build"]


def test_a_unit_that_broke_is_wrong_until_it_works(tmp_path):
    clock = iter(range(100)).__next__
    record = record_at(tmp_path)
    assert not check(record, ["build", "kernels"], Units(build=UnitError("no compiler")), 50, clock)
    assert record.wrong == ["build: broke"]
    assert "build: broke" in gpu_check.page(record)
    again = record_at(tmp_path)
    assert check(again, ["build", "kernels"], Units(), 50, clock)
    assert again.wrong == []


def test_an_entry_that_is_wrong_is_tried_again(tmp_path):
    record = record_at(tmp_path)
    record.note("contracts", "fused", {"error": "one failed"})
    assert record.wrong == ["contracts: fused: one failed"]
    units = Units()
    check(record, ["contracts"], units, 50, iter(range(100)).__next__)
    assert units.asked == [("contracts", [])]


def test_results_of_another_device_are_not_mixed_in(tmp_path):
    record_at(tmp_path).write()
    with pytest.raises(SystemExit, match="was made with"):
        Record.at(tmp_path / "check.json", SETTINGS | {"device": "cuda"}, is_anew=False)
    assert Record.at(tmp_path / "check.json", SETTINGS | {"device": "cuda"}, is_anew=True).finished == []


def test_the_page_puts_what_was_found_beside_the_goals(tmp_path):
    record = record_at(tmp_path)
    record.note("machine", "limits", {"copy_gb_per_s": 3000.0})
    record.note("workloads", "W1", {"value": 150.0, "unit": "tokens/s", "share_of_limit": 0.8})
    record.note("kernels", "rms_norm: a prompt of 8B", {"microseconds": 25.0, "share_of_bandwidth": 0.8})
    text = gpu_check.page(record)
    assert "| W1 | 150 | tokens/s | 0.8 | 0.85 |" in text
    assert "| rms_norm: a prompt of 8B | 25 | 0.8 |  |" in text


@pytest.mark.skipif(find_spec("triton") is None, reason='needs triton: pip install "quire[gpu-dev]"')
@pytest.mark.parametrize(
    "units",
    [
        "kernels",
        pytest.param("build,contracts,tokens,figure,workloads", marks=pytest.mark.nightly),
    ],
)
def test_all_of_it_runs_in_small(tmp_path, units):
    out = tmp_path / "check"
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--small", "--only", units]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    found = json.loads(out.with_suffix(".json").read_text())
    assert found["finished"] == ["machine", *units.split(",")]
    assert all(found["entries"].get(unit) for unit in found["finished"] if unit != "build")
    assert "Nothing." in out.with_suffix(".md").read_text()


@pytest.mark.skipif(find_spec("triton") is None, reason='needs triton: pip install "quire[gpu-dev]"')
def test_examples_are_what_their_kernels_can_read(triton_kernels, monkeypatch):
    """Small launches, and the first program of each other one, between guards: numbers that say where to read and write
    must be real ones."""
    import importlib
    from dataclasses import replace

    from quire.worker.kernels import triton as home
    from quire.worker.kernels.triton import launch
    from quire.worker.kernels.triton.example_inputs import examples_on

    run = launch.run

    def run_some(launched):
        run(launched if math.prod(launched.grid) <= 16 else replace(launched, grid=(1,) * len(launched.grid)))

    monkeypatch.setattr(launch, "run", run_some)
    for file in sorted({*home.TWINS.values(), *home.FURTHER}):
        for example in importlib.import_module(f"{home.__name__}.{file}").EXAMPLES:
            if launch.least_bytes(example) < 20e6 and example.operations < 2e9:
                with examples_on("cpu"):
                    example.call()
