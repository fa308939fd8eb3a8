"""Products by instructions that this processor lacks: with a library that has them in another form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.worker.kernels import cpu

SUITES = {"QUIRE_EMULATE_AMX": ("test_matmul.py", "test_adapters.py"), "QUIRE_EMULATE_AVX_VNNI": ("test_matmul.py",)}
NAMES = {"QUIRE_EMULATE_AMX": "amx", "QUIRE_EMULATE_AVX_VNNI": "avx2_vnni"}


def has_the_other_instructions() -> bool:
    if not cpu.load():
        return False
    before = cpu.statistics()["isa"]
    return cpu.select_isa("avx512_bf16") and cpu.select_isa(before)


@pytest.mark.skipif(not has_the_other_instructions(), reason="what they are emulated with comes with avx512_bf16")
@pytest.mark.parametrize("switch", SUITES)
def test_the_suite_of_products_with_emulated_instructions(switch: str) -> None:
    """In a process of its own: the library cannot be taken back once it is loaded."""
    suites = [str(Path(__file__).parent / name) for name in SUITES[switch]]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *suites]
    chosen = ["-k", f"{NAMES[switch]} or every_instruction_set"]
    switches = {switch: "1", "QUIRE_CPU_KERNELS": "jit"}
    done = subprocess.run([*command, *chosen], env={**os.environ, **switches}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
