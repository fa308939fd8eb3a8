"""The products on the matrix unit, where there is none: with a library that computes its instructions in plain C++."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.worker.kernels import cpu


def has_the_other_instructions() -> bool:
    if not cpu.load():
        return False
    before = cpu.statistics()["isa"]
    return cpu.select_isa("avx512_bf16") and cpu.select_isa(before)


@pytest.mark.skipif(not has_the_other_instructions(), reason="AMX is for processors that also have avx512_bf16")
def test_the_suite_of_products_on_an_emulated_matrix_unit() -> None:
    """In a process of its own: the library cannot be taken back once it is loaded."""
    suites = [str(Path(__file__).parent / name) for name in ("test_matmul.py", "test_adapters.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *suites]
    chosen = ["-k", "amx or every_instruction_set"]
    switches = {"QUIRE_EMULATE_AMX": "1", "QUIRE_CPU_KERNELS": "jit"}
    done = subprocess.run([*command, *chosen], env={**os.environ, **switches}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
