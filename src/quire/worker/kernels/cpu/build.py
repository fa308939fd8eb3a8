"""Build the C++ kernels: `python -m quire.worker.kernels.cpu.build`, or by the first call that needs them.

One shared library holds the kernels for every instruction set of this architecture; which one runs is decided when it
is loaded. It goes to the user's cache under a name made of everything that it depends on, so a new compiler or a
changed source builds a new one beside the old. It needs torch's headers (stable ABI) and any g++ that knows C++17.

`--for-wheel` puts it among the sources as well, for a wheel to bring along; it serves there while the sources are those
that it was made of, and nobody needs a compiler.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from quire.cache_folder import cache_folder, check_private
from quire.worker.kernels.cpu.compilers import BuildError, ending_with_us, run

_logger = logging.getLogger("quire")
SOURCES = Path(__file__).parents[3] / "csrc" / "cpu"
# among the sources, what a wheel brings
PREBUILT = "prebuilt"
PER_ISA = (
    "adapter_rows.cpp",
    "attention_tile.cpp",
    "cache_rows.cpp",
    "fused.cpp",
    "matmul.cpp",
    "recurrent.cpp",
    "sampling_kernels.cpp",
)
COMMON = (
    "arena.cpp",
    "attention.cpp",
    "attention_plan.cpp",
    "cache.cpp",
    "crew.cpp",
    "decode.cpp",
    "isa.cpp",
    "matmul_pack.cpp",
    "operators_adapters.cpp",
    "operators_attention.cpp",
    "operators_linear.cpp",
    "operators_ranks.cpp",
    "operators_recurrent.cpp",
    "operators_rows.cpp",
    "operators_sampling.cpp",
    "operators_stages.cpp",
    "program.cpp",
    "sampling.cpp",
    "sequence_states.cpp",
    "tuning.cpp",
)


@dataclass(frozen=True)
class Architecture:
    """Instruction sets with the flags that they are compiled with, the least first. Never -march=native: the cache may
    be a network folder that machines with other processors share."""

    isas: dict[str, tuple[str, ...]]
    # Sets that differ from a lesser one in these files alone; isa_*.h puts the rest together.
    only: dict[str, tuple[str, ...]]
    common: tuple[str, ...] = COMMON


_AVX512 = ("-march=x86-64-v4",)
X86 = Architecture(
    isas={
        "avx2": ("-march=x86-64-v3",),
        # Its one instruction is written in assembly, as is AMX: flags for them would be errors of compilers before
        # GCC 11.
        "avx2_vnni": ("-march=x86-64-v3", "-DQUIRE_AVX_VNNI"),
        "avx512": _AVX512,
        "avx512_vnni": (*_AVX512, "-mavx512vnni"),
        "avx512_bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
        "amx": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    },
    only={
        "avx2_vnni": ("matmul.cpp",),
        "avx512_vnni": ("matmul.cpp",),
        "amx": ("adapter_tiles.cpp", "matmul_amx.cpp"),
    },
    common=("amx_support.cpp", *COMMON),
)
ARM = Architecture(
    isas={
        "neon": ("-march=armv8-a",),
        "neon_dotprod": ("-march=armv8.2-a+dotprod",),
        "neon_bf16": ("-march=armv8.2-a+dotprod+bf16+i8mm",),
    },
    only={"neon_dotprod": ("matmul.cpp",)},
)
_ARCHITECTURES = {"x86_64": X86, "AMD64": X86, "aarch64": ARM}
# Those of this machine; without kernels for it, those of any, for what only reads their names.
HERE = _ARCHITECTURES.get(platform.machine(), X86)
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    # What the vector code does not rely on and what keeps the compiler from using vectors for scalars.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    # GCC's own header of AVX-512 intrinsics sets these off, on purpose, thousands of times.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the oldest torch that the library must work with: 2.11
)


# Of the libraries and of the objects that they are made of, so many of the last used stay.
_KEPT_LIBRARIES = 8
_KEPT_OBJECTS = 256


def library_path() -> Path:
    """Where the library of these sources and this compiler is or would be. Raises BuildError if none can be built."""
    if platform.machine() not in _ARCHITECTURES:
        raise BuildError(f"no C++ kernels for {platform.machine()} processors")
    return cache_folder() / f"kernels-{_key(_compiler())}.so"


def build() -> Path:
    """The library, built if it is not there yet. Processes that ask at the same time wait for one of them."""
    prebuilt = _prebuilt_path()
    if prebuilt.exists():
        return prebuilt
    target = library_path()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        check_private(target.parent)
    except OSError as error:
        raise BuildError(str(error)) from None
    if target.exists():
        _note_use(target)
        return target
    # warnings, so that whoever waits for a first start sees why, whatever the level of the log
    _logger.warning("CPU kernels: compiled for this machine now, once for this version of Quire: a minute or two.")
    began = time.monotonic()
    with (target.parent / f"{target.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with _scratch_of(target) as folder, ending_with_us():
                finished = _compile(_compiler(), folder, HERE, _libraries_of_torch())
                finished.replace(target)  # whoever looks sees the whole library or none
            _forget(target.parent)
    seconds = time.monotonic() - began
    _logger.warning("CPU kernels: compiled after %.1f s. Later starts find them in %s.", seconds, target.parent)
    return target


@contextlib.contextmanager
def _scratch_of(target: Path) -> Iterator[Path]:
    """An empty folder beside it. Who holds the lock is alone with it: what is there was left by one that was killed."""
    folder = target.with_suffix(".build")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _note_use(path: Path) -> None:
    """In its time stamp. The folder may be one that this user can only read."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _forget(folder: Path) -> None:
    """What earlier sources and compilers have left, but the last few: the folder must not grow for ever.

    Another process may do the same; a library that somebody runs lives on without its name.
    """
    for pattern, num_kept in (
        ("kernels-*.so", _KEPT_LIBRARIES),
        ("tuning-*.json", _KEPT_LIBRARIES),
        ("objects/*.o", _KEPT_OBJECTS),
    ):
        with contextlib.suppress(OSError):
            by_use = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
            for old in by_use[num_kept:]:
                old.unlink(missing_ok=True)
                old.with_suffix(".lock").unlink(missing_ok=True)


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise BuildError(f"no C++ compiler found ({name} is not on the PATH)")
    return compiler


def _sanitizer() -> tuple[str, ...]:
    """QUIRE_SANITIZE=address: a library that stops at the first access outside of what was allocated. Slow; for tests,
    in a process that begins with the sanitizer's own library (tests/worker/kernels/test_sanitized.py)."""
    name = os.environ.get("QUIRE_SANITIZE")
    return (f"-fsanitize={name}", "-fno-omit-frame-pointer", "-g1", "-O1") if name else ()


# Switches of libraries for tests (tests/worker/kernels/test_emulated.py), and whose sources see them.
# QUIRE_EMULATE_AMX=1 has the matrix unit in plain C++, which is the first choice of a processor with avx512_bf16 and
# hundreds of times slower. QUIRE_EMULATE_AVX_VNNI=1 has that instruction as AVX-512 writes it, as fast as the other.
_EMULATED = {
    "QUIRE_EMULATE_AMX": ("adapter_tiles.cpp", "amx_support.cpp", "matmul_amx.cpp"),
    "QUIRE_EMULATE_AVX_VNNI": ("isa.cpp", "matmul.cpp"),
}


def _emulation(source: str | None = None) -> tuple[str, ...]:
    """What a source is compiled with for the sake of them; or any source."""
    return tuple(
        f"-D{name}"
        for name, sources in _EMULATED.items()
        if os.environ.get(name) == "1" and (source is None or source in sources)
    )


def _prebuilt_path() -> Path:
    return SOURCES / PREBUILT / f"kernels-{_key_of('any compiler')}.so"


def _key(compiler: str) -> str:
    return _key_of(run([compiler, "--version"]))


def _key_of(compiler_version: str) -> str:
    digest = hashlib.sha256()
    digest.update(compiler_version.encode())
    digest.update(repr((HERE, FLAGS, _sanitizer(), _emulation())).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def compile_for(machine: str, compiler: str, folder: Path) -> Path:
    """A library for another architecture, by a compiler for that. Torch is not here for it, so nothing of torch is
    linked: its names are looked for when the library is loaded."""
    return _compile(compiler, folder, _ARCHITECTURES[machine], ())


def _libraries_of_torch() -> tuple[str, ...]:
    return (f"-L{torch_folder() / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10")


def _compile(compiler: str, folder: Path, architecture: Architecture, libraries: Sequence[str]) -> Path:
    include = ("-isystem", str(torch_folder() / "include"))
    # The longest first: with two cores that is what decides the time.
    per_isa = dict.fromkeys((*PER_ISA, *(source for sources in architecture.only.values() for source in sources)))
    commands = [
        (source, [*flags, f"-DQUIRE_ISA={isa}"], f"{Path(source).stem}.{isa}.o")
        for source in per_isa
        for isa, flags in reversed(architecture.isas.items())
        if source in architecture.only.get(isa, PER_ISA)
    ]
    commands += [(source, list(include), f"{Path(source).stem}.o") for source in reversed(architecture.common)]

    version = run([compiler, "--version"])

    def compile_one(command: tuple[str, list[str], str]) -> str:
        source, flags, name = command
        flags = [*flags, *_emulation(source)]
        kept = _kept_object(version, SOURCES / source, flags)
        if kept.exists():
            _note_use(kept)
        else:
            run(
                [compiler, *FLAGS, *flags, *_sanitizer(), "-c", str(SOURCES / source), "-o", str(folder / name)], folder
            )
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / name).replace(kept)
        return str(kept)

    with ThreadPoolExecutor(max_workers=min(8, len(os.sched_getaffinity(0)))) as pool:
        objects = list(pool.map(compile_one, commands))
    target = folder / "kernels.so"
    run([compiler, "-shared", "-pthread", *_sanitizer(), *objects, *libraries, "-o", str(target)], folder)
    return target


def _kept_object(compiler: str, source: Path, flags: Sequence[str]) -> Path:
    """Where the object of a source is kept, so that whoever works on one kernel does not compile the others again."""
    digest = hashlib.sha256(repr((compiler, FLAGS, flags, _sanitizer())).encode())
    for file in _with_headers(source):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return cache_folder() / "objects" / f"{source.stem}-{digest.hexdigest()[:16]}.o"


def _with_headers(source: Path) -> list[Path]:
    """A source and all of our own headers that it includes, directly or not."""
    found, waiting = [source], [source]
    while waiting:
        for name in re.findall(r'^#include "(.+)"', waiting.pop().read_text(), re.MULTILINE):
            if (header := SOURCES / name) not in found:
                found.append(header)
                waiting.append(header)
    return found


def torch_folder() -> Path:
    # Found without importing it: the command builds before anything runs.
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed")
    return Path(spec.origin).parent


def _build_for_wheel() -> Path:
    """Beside no other: a wheel has one library, that of its own sources."""
    prebuilt = _prebuilt_path()
    shutil.rmtree(prebuilt.parent, ignore_errors=True)
    library = build()
    prebuilt.parent.mkdir()
    shutil.copyfile(library, prebuilt)
    return prebuilt


def main(arguments: Sequence[str]) -> int:
    start = time.monotonic()
    try:
        target = _build_for_wheel() if "--for-wheel" in arguments else build()
    except (BuildError, OSError) as error:
        print(f"The C++ kernels were not built: {error}", file=sys.stderr)
        return 1
    print(f"{target} ({time.monotonic() - start:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
