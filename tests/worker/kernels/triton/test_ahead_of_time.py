"""The kernels compile for devices that are not here, and need no more of them than their budgets say."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.worker.kernels.triton.ahead_of_time import Compiled, budgets

from quire.worker.kernels import triton as home

ROOT = Path(__file__).parents[4]
FILES = sorted({*home.TWINS.values(), *home.FURTHER})


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("triton") is None, reason='needs triton: pip install "quire[gpu-dev]"')
@pytest.mark.parametrize("file", FILES)
def test_kernels_keep_their_budgets(file):
    # in a process of its own: in this one Triton interprets
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
    command = [sys.executable, "-m", "tests.worker.kernels.triton.ahead_of_time", file]
    output = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    compiled = {row.place: row for row in (Compiled(**json.loads(line)) for line in output.splitlines())}
    budget_by_place = {row.place: row for row in budgets(file)}
    assert compiled.keys() == budget_by_place.keys()
    for place, row in compiled.items():
        budget = budget_by_place[place]
        assert row.spills <= budget.spills, place
        assert row.narrow_arithmetic == 0, f"{place}: the interpreter cannot check this arithmetic"
        assert row.registers <= budget.registers, place
        assert row.shared_bytes <= budget.shared_bytes, place
        assert row.matrix_instructions >= budget.matrix_instructions, place


@pytest.mark.parametrize("file", FILES)
def test_each_file_has_a_budget(file):
    assert budgets(file), "python -m tests.worker.kernels.triton.ahead_of_time --write"
    assert not [row.place for row in budgets(file) if row.spills]
