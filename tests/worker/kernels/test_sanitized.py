"""The contract suites of all kernels once more, with a library that notices every access beyond an allocation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.worker.kernels import cpu


def _library(compiler: str, name: str) -> Path:
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()).resolve()


@pytest.mark.nightly
@pytest.mark.skipif(not cpu.load(), reason="there are no C++ kernels to look at")
def test_the_contract_suites_under_address_sanitizer(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    libraries = [_library(compiler, name) for name in ("libasan.so", "libstdc++.so")]
    if not all(library.is_file() for library in libraries):
        pytest.skip(f"{compiler} has no address sanitizer")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    switches = {"QUIRE_SANITIZE": "address", "QUIRE_EMULATE_AMX": "1", "QUIRE_CACHE_DIR": str(cache)}
    build = {**os.environ, **switches}
    subprocess.run([sys.executable, "-m", "quire.worker.kernels.cpu.build"], check=True, env=build)
    # Leaks are Python's own way with memory. Exceptions need the C++ library to be there from the start.
    preload = " ".join(str(library) for library in libraries)
    options = {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0", "QUIRE_CPU_KERNELS": "jit"}
    here, chosen = Path(__file__).parent, ["-k", "not library and not emulated"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here), *chosen]
    subprocess.run(command, check=True, env={**build, **options, "OMP_NUM_THREADS": "2"})
