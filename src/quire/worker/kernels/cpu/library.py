"""Load the library of C++ kernels, once for each process."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from quire.errors import OptionError

_logger = logging.getLogger("quire")
_lock = threading.Lock()
_is_decided = False
_library: ctypes.CDLL | None = None
_path: Path | None = None
_reason = "not asked for yet"
_tuning = ""
_has_measured = False
# Threads and their processors, if anybody said; else as many as torch has.
_crew: tuple[int, Sequence[int] | None] | None = None


def load() -> bool:
    """True if the C++ kernels run from now on; decided by the first call, which may build them (some seconds).

    QUIRE_CPU_KERNELS: `auto` (default) falls back to the reference and says why in the log, `jit` raises instead,
    `reference` and `triton`, which is Triton's interpreter (`kernels/triton`), never load anything.
    """
    global _is_decided
    if not _is_decided:
        with _lock:
            if not _is_decided:
                tuning = os.environ.get("QUIRE_CPU_TUNING", "auto")
                if tuning not in ("auto", "again", "off"):
                    raise OptionError(f"QUIRE_CPU_TUNING={tuning}: must be auto, again or off.")
                _decide(os.environ.get("QUIRE_CPU_KERNELS", "auto"))
                _is_decided = True
                _tune(tuning, may_measure=False)
    return _library is not None


def measure(num_weight_bytes: int) -> None:
    """What suits this processor and no earlier start has measured, once in a process, before a model of this size is
    loaded. Weights that a cache holds are spared it: nothing that is measured is about them."""
    global _has_measured
    from quire.worker.kernels.cpu import tuning

    is_small = 0 < num_weight_bytes < tuning.WEIGHT_BYTES
    if not is_small and load() and not _has_measured:
        _has_measured = True
        _tune(os.environ.get("QUIRE_CPU_TUNING", "auto"), may_measure=True)


def _decide(choice: str) -> None:
    global _library, _path, _reason
    if choice not in ("auto", "jit", "reference", "triton"):
        raise OptionError(f"QUIRE_CPU_KERNELS={choice}: must be auto, jit, reference or triton.")
    if choice in ("reference", "triton"):
        _reason = f"QUIRE_CPU_KERNELS={choice}"
        return
    # Here, not at the top: `python -m ...build` imports this package first and must not find itself loaded.
    from quire.worker.kernels.cpu import build
    from quire.worker.kernels.cpu.compilers import BuildError

    try:
        _path = build.build()
        # Registers itself with torch while it is loaded; see the ends of operators_*.cpp.
        library = ctypes.CDLL(str(_path))
    except (BuildError, OSError) as error:
        if choice == "jit":
            raise
        _reason = str(error)
        _logger.warning("CPU kernels: plain PyTorch, several times slower, because: %s", error)
        return
    library.quire_isa.restype = ctypes.c_char_p
    if not library.quire_isa():
        _reason = "this processor has no AVX2"
        _logger.warning("CPU kernels: plain PyTorch, several times slower, because %s", _reason)
        return
    asked, found = os.environ.get("QUIRE_CPU_ISA"), library.quire_isa().decode()
    if asked and asked != found:
        library.quire_isa_fault.restype = ctypes.c_char_p
        raise OptionError(
            f"QUIRE_CPU_ISA={asked}: {library.quire_isa_fault(asked.encode()).decode()}. The best of "
            f"{', '.join(build.HERE.isas)} that can be used here is {found}. Leave it out, or name a lesser one."
        )
    for name, result, arguments in (
        ("quire_record_begin", None, [ctypes.c_int64]),
        ("quire_record_end", ctypes.c_void_p, []),
        ("quire_program_drop", None, [ctypes.c_void_p]),
        ("quire_decode", ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]),
        ("quire_program_size", ctypes.c_int64, [ctypes.c_void_p]),
        ("quire_record_input", None, [ctypes.c_void_p, ctypes.c_int64]),
        ("quire_program_can_narrow", ctypes.c_bool, [ctypes.c_void_p]),
        (
            "quire_program_run",
            ctypes.c_char_p,
            [ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64],
        ),
    ):
        getattr(library, name).restype = result
        getattr(library, name).argtypes = arguments
    _library = library
    set_crew(*(_crew or (torch.get_num_threads(), None)))


def _tune(choice: str, *, may_measure: bool) -> None:
    """After the decision: what is measured calls the kernels. Else as earlier starts have measured."""
    global _tuning
    _tuning = choice
    if _library is None or _path is None or choice == "off":
        return
    from quire.worker.kernels.cpu import tuning

    isa = _library.quire_isa().decode()
    knobs = tuning.LibraryKnobs(_library)
    assert _crew is not None
    num_threads = _crew[0]
    try:
        file = tuning.file_of(_path, isa, num_threads)
    except OSError as error:  # a user without a home, whose kernels came with the wheel
        _tuning = tuning.leave(knobs, tuning.Findings(), str(error))
        return
    if may_measure:
        _tuning = tuning.apply(knobs, file, lambda: tuning.Probes().by_name(), num_threads, choice == "again")
    else:
        _tuning = tuning.read(file, knobs).in_words(knobs)
    _logger.info("CPU kernels: %s, tuning: %s", isa, _tuning)


def loaded() -> ctypes.CDLL:
    """The library itself, for what is no torch operator."""
    if not load() or _library is None:
        raise RuntimeError(f"the C++ kernels are not loaded: {_reason}")
    return _library


def set_crew(num_threads: int, processors: Sequence[int] | None = None) -> None:
    """So many threads compute from now on, each on its processor if any are named. Said before the kernels are loaded,
    it holds from then on."""
    global _crew
    _crew = num_threads, processors
    if _library is not None:
        pinned = None if processors is None else (ctypes.c_int * num_threads)(*processors)
        _library.quire_set_crew(num_threads, pinned)


def select_isa(name: str) -> bool:
    """Use the kernels of another instruction set from now on; False if this processor cannot run it. For tests."""
    return load() and _library is not None and bool(_library.quire_select_isa(name.encode()))


def statistics() -> dict[str, str]:
    """Which kernels run on the CPU, and why."""
    if _library is None:
        return {"kernels": "reference", "reason": _reason}
    return {"kernels": "c++", "isa": _library.quire_isa().decode(), "path": str(_path), "tuning": _tuning}
