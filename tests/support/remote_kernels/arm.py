"""The kernels for 64-bit ARM, built and run on a machine that is none: by Debian's cross compiler and an emulator.

    python -m tests.support.remote_kernels.arm [ARGUMENTS OF PYTEST]

builds a driver and the library into build/arm and runs the suites of the kernels. A remote shell may stand in place of
the emulator, where both machines have the same paths: QUIRE_ARM_RUNNER="ssh graviton".
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.worker.kernels.cpu import build

COMPILER = "aarch64-linux-gnu-g++"
# max: every instruction set that the kernels are written for
EMULATOR = "qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu"
PACKAGES = "apt install g++-aarch64-linux-gnu qemu-user"
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]
SUITES = ("matmul", "attention", "fused", "experts", "adapters", "recurrent", "sampling")
# What asks for this machine's own compiler or library.
_NOT_HERE = "not share_nothing and not compiled"


def fault() -> str | None:
    """Why it cannot be done here, or None."""
    runner = shlex.split(os.environ.get("QUIRE_ARM_RUNNER", EMULATOR))
    missing = [program for program in (COMPILER, runner[0]) if shutil.which(program) is None]
    return f"no {' and no '.join(missing)} here ({PACKAGES})" if missing else None


def build_all(folder: Path) -> tuple[Path, Path]:
    """The driver and the library."""
    folder.mkdir(parents=True, exist_ok=True)
    library = build.compile_for("aarch64", COMPILER, folder)
    driver = folder / "driver"
    include = build.torch_folder() / "include"
    flags = ["-std=c++17", "-O2", "-Wall", "-rdynamic", "-pthread", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    sources = [str(_HERE / "driver.cpp"), "-isystem", str(include), "-ldl", "-o", str(driver)]
    subprocess.run([COMPILER, *flags, *sources], check=True)
    return driver, library


def run_suites(driver: Path, library: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a plugin takes the place of this machine's kernels."""
    runner = os.environ.get("QUIRE_ARM_RUNNER", EMULATOR)
    environment = {
        **os.environ,
        "QUIRE_REMOTE_KERNELS": f"{runner} {shlex.quote(str(driver))} {shlex.quote(str(library))}",
        "QUIRE_CPU_KERNELS": "reference",
        "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)]),
    }
    suites = [str(_ROOT / f"tests/worker/kernels/test_{name}.py") for name in SUITES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    plugin = ["-p", "tests.support.remote_kernels.plugin", "-m", "not gpu", "-k", _NOT_HERE]
    return subprocess.run([*command, *plugin, *(arguments or suites)], env=environment, cwd=_ROOT, text=True)


def main(arguments: Sequence[str]) -> int:
    if (reason := fault()) is not None:
        print(reason, file=sys.stderr)
        return 1
    return run_suites(*build_all(_ROOT / "build" / "arm"), arguments).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
