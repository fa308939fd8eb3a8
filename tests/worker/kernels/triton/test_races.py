"""Races between programs, and what is read or written out of bounds: the tests of the kernels under `ttsem`.

It runs what Triton's compiler makes of a kernel, watches each access, and pretends that there is a GPU. It needs Python
3.12 and versions of torch and Triton of its own, so it has an environment of its own, which QUIRE_TTSEM names:

    python3.12 -m venv ttsem && ttsem/bin/pip install "ttsem[triton]" hypothesis psutil transformers msgspec llguidance
    QUIRE_TTSEM=$PWD/ttsem/bin/python python -m pytest -m nightly tests/worker/kernels/triton/test_races.py
"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PYTHON = os.environ.get("QUIRE_TTSEM")
# By file: which of its tests, because each access is counted and a launch takes seconds. None of those that find memory
# by addresses in a table (grouped products, recurrent states, copies of blocks): it knows tensors of a launch alone.
# In the interpreter these stand between guards like all others.
CHOSEN = {
    "adapters": "20-",
    "attention": "reference and not all_cases or write_kv",
    "experts": "weigh_experts or route",
    "fused": "dtype1",
    "linear": "test_codes or test_floats",
    "prepare_blocks": "0",
    "prepare_heads": "dtype1",
    "sampling": "bitmask or gather or penalise or best",
}


@pytest.mark.nightly
@pytest.mark.skipif(PYTHON is None, reason="QUIRE_TTSEM names no Python that has ttsem")
@pytest.mark.parametrize("file", CHOSEN)
def test_no_races_and_nothing_out_of_bounds(file):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"QUIRE_KERNEL_DEVICE": "cuda", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONUNBUFFERED": "1"}
    tests = [f"tests/worker/kernels/triton/test_{file}.py", "-k", CHOSEN[file], "-q", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [str(PYTHON), "-m", "ttsem.sanitize", "pytest", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]
    assert "passed" in finished.stdout
