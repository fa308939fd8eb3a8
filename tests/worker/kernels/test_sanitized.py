"""The contract suites of all kernels once more, with a library that notices every access beyond an allocation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.worker.kernels import cpu


@pytest.mark.nightly
@pytest.mark.skipif(not cpu.load(), reason="there are no C++ kernels to look at")
def test_the_contract_suites_under_address_sanitizer(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = Path(found.stdout.strip()).resolve()
    if not library.is_file():
        pytest.skip(f"{compiler} has no address sanitizer")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    build = {**os.environ, "QUIRE_SANITIZE": "address", "QUIRE_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-m", "quire.worker.kernels.cpu.build"], check=True, env=build)
    # Leaks are Python's own way with memory; the interceptor of stacks disturbs torch.
    options = {"LD_PRELOAD": str(library), "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0", "QUIRE_CPU_KERNELS": "jit"}
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here), "-k", "not library"]
    subprocess.run(command, check=True, env={**build, **options, "OMP_NUM_THREADS": "2"})
