"""Which of the kernels' tunable numbers suit this processor and so many threads: measured at the first start with a
model that no cache holds, and what it had no time for at the next ones; kept beside the library.

What can be chosen stands in csrc/cpu/tuning.cpp, the default first; every choice gives the same bits. Candidates take
turns in rounds, so that other work on the machine meets all of them alike, and one that is not the default is taken
only where it wins clearly. QUIRE_CPU_TUNING: `auto` (default) takes what was measured earlier, else measures; `again`
measures anew; `off` takes the defaults.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from quire.cache_folder import cache_folder
from quire.errors import one_line

_logger = logging.getLogger("quire")
# makes the work that is timed
MakeProbe: TypeAlias = Callable[[], Callable[[], object]]
SECONDS = 3.0
# A candidate takes the default's place if it takes at most this share of its time at the median of the rounds, and is
# no slower in three rounds of four.
CLEAR_WIN = 0.97
# Where the middle half of the default's own times differs by more, other work decides who is faster: nothing is chosen.
STEADY = 1.25
_FEWEST_ROUNDS = 5
_MOST_ROUNDS = 25
# Starts that measure: on a machine that is always busy the rest keeps its defaults.
MOST_TRIES = 3
_VERSION = 3
_DEFAULTS = "defaults"
# of a file, which has some hundred for each number
_MOST_BYTES = 1 << 20
# Of each kind of weight: more than the caches of most processors.
WEIGHT_BYTES = 48 << 20
# Outputs and inputs: wide and narrow layers of a small model.
_SHAPES = ((6144, 1024), (1024, 3072))


@dataclass(frozen=True)
class Tunable:
    """A number that the kernels read, and what it may be: the default first."""

    name: str
    choices: tuple[int, ...]


class Knobs(Protocol):
    """Where choices are made."""

    def tunables(self) -> list[Tunable]: ...

    def set(self, name: str, value: int) -> bool:
        """False if there is no such choice."""


class LibraryKnobs:
    """Those of the loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.quire_tunables.restype = ctypes.c_char_p
        library.quire_tune.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        self._library = library

    def tunables(self) -> list[Tunable]:
        lines = [line.split() for line in self._library.quire_tunables().decode().splitlines()]
        return [Tunable(name, tuple(map(int, choices))) for name, *choices in lines]

    def set(self, name: str, value: int) -> bool:
        return bool(self._library.quire_tune(name.encode(), value))


@dataclass(frozen=True)
class Choice:
    """What was chosen for a tunable, and the time of each other choice by the default's: median and quartiles."""

    value: int
    ratios: dict[int, tuple[float, float, float]]


@dataclass(frozen=True)
class Findings:
    """What was measured so far, by the name of a tunable, in so many starts."""

    choices: dict[str, Choice] = field(default_factory=dict)
    num_tries: int = 0

    @classmethod
    def parse(cls, text: bytes) -> Findings:
        """Out of a file; raises one of _NO_FINDINGS if it is none."""
        content = json.loads(text)
        ratios = content["time_by_default_median_and_quartiles"]
        choices = {
            name: Choice(value, {int(other): tuple(times) for other, times in ratios[name].items()})
            for name, value in content["choices"].items()
        }
        return cls(choices, int(content["tries"]))

    def and_then(self, found: Mapping[str, Choice]) -> Findings:
        """With what one more start has measured."""
        measured = {name: choice for name, choice in found.items() if choice.ratios}
        return Findings({**self.choices, **measured}, self.num_tries + 1)

    def set_in(self, knobs: Knobs) -> None:
        """All others get their defaults. ValueError: there is no such choice."""
        set_defaults(knobs)
        choices = {tunable.name: tunable.choices for tunable in knobs.tunables()}
        for name, choice in self.choices.items():
            if type(choice.value) is not int or choice.value not in choices.get(name, ()):
                raise ValueError(f"{name[:40]!r}: {str(choice.value)[:40]!r} is no choice")
            knobs.set(name, choice.value)

    def in_words(self, knobs: Knobs) -> str:
        """Those that are not the default."""
        default = {tunable.name: tunable.choices[0] for tunable in knobs.tunables()}
        values = {name: choice.value for name, choice in self.choices.items()}
        return " ".join(f"{name}={value}" for name, value in values.items() if value != default[name]) or _DEFAULTS


# what reading something else ends in, a number without end and what is nested too deep among it
_NO_FINDINGS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def set_defaults(knobs: Knobs) -> None:
    for tunable in knobs.tunables():
        knobs.set(tunable.name, tunable.choices[0])


def tune(
    knobs: Knobs, probes: Mapping[str, MakeProbe], clock: Callable[[], float], seconds: float
) -> dict[str, Choice]:
    """One tunable after the other, each with what was chosen before, `seconds` in all. `probes` make the work that is
    timed, by the name of a tunable; what has none, or no time, stays as it is."""
    end = clock() + seconds
    chosen: dict[str, Choice] = {}
    tunables = [tunable for tunable in knobs.tunables() if tunable.name in probes]
    for i, tunable in enumerate(tunables):
        start = clock()
        if start >= end:  # on a busy machine even the first look at memory may have taken all there was
            break
        until = start + (end - start) / (len(tunables) - i)
        probe = probes[tunable.name]()
        chosen[tunable.name] = choice = _choose(knobs, tunable, probe, clock, until)
        knobs.set(tunable.name, choice.value)
    return chosen


def _choose(
    knobs: Knobs, tunable: Tunable, probe: Callable[[], object], clock: Callable[[], float], until: float
) -> Choice:
    default, *others = tunable.choices
    times: dict[int, list[float]] = {choice: [] for choice in tunable.choices}
    began = clock()
    probe()  # touches memory for the first time
    longest = clock() - began
    for num_rounds in range(_MOST_ROUNDS):
        began = clock()
        if began + longest > until:
            break
        # every second round backwards, so that nobody always comes after the same other one
        first = num_rounds // 2 % len(times)
        order = tunable.choices[first:] + tunable.choices[:first]
        for choice in order[:: 1 if num_rounds % 2 == 0 else -1]:
            knobs.set(tunable.name, choice)
            start = clock()
            probe()
            times[choice].append(clock() - start)
        longest = max(longest, clock() - began)
    knobs.set(tunable.name, default)
    if len(times[default]) < _FEWEST_ROUNDS or not _is_steady(times[default]):
        return Choice(default, {})
    ratios = {choice: _quartiles(times[choice], times[default]) for choice in others}
    winners = [(ratio[0], choice) for choice, ratio in ratios.items() if ratio[0] <= CLEAR_WIN and ratio[2] <= 1]
    return Choice(min(winners)[1] if winners else default, ratios)


def _is_steady(times: Sequence[float]) -> bool:
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high <= STEADY * low


def _quartiles(times: Sequence[float], default_times: Sequence[float]) -> tuple[float, float, float]:
    ratios = [time / max(default, 1e-9) for time, default in zip(times, default_times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return round(middle, 4), round(low, 4), round(high, 4)


class Probes:
    """Work like that of a model's layers: weights and keys that no cache holds, on all threads."""

    def __init__(self) -> None:
        self._weights = cache(_weights)

    def by_name(self) -> dict[str, MakeProbe]:
        kinds = ("floats", "codes_8", "codes_4")
        return {
            **{f"fetch_bytes.{kind}": partial(self._products, kind, 1) for kind in kinds},
            **{f"panels.{kind}": partial(self._products, kind, 1) for kind in kinds},
            "rows_to_fetch": partial(self._products, "floats", 4, 16, 48),
            "block_bytes": partial(self._products, "floats", 384),
            "words_at_once": partial(self._products, "floats", 384),
            "prepared_bytes": partial(self._products, "floats", 2048),
            "pieces": partial(self._products, "floats", 1, 64),
            "attention_lines": partial(_attention, tokens=1),
            "attention_pieces": partial(_attention, tokens=128),
        }

    def _products(self, kind: str, *rows: int) -> Callable[[], object]:
        """All weights with few rows, two of them with many, where arithmetic takes the time."""
        calls = []
        for num_rows in rows:
            weights = self._weights(kind) if num_rows < 64 else self._weights(kind)[:2]
            for num_outputs, num_inputs, packed in weights:
                x = torch.full((num_rows, num_inputs), 0.01, dtype=torch.bfloat16)
                calls.append(partial(torch.ops.quire.packed_linear, x, packed, None, num_outputs))
        return partial(_call_all, calls)


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _weights(kind: str) -> list[tuple[int, int, Tensor]]:
    """As many of each shape as fill WEIGHT_BYTES."""
    plain = {shape: _packed(kind, *shape) for shape in _SHAPES}
    num_bytes = sum(first().numel() for first in plain.values())
    times = max(1, WEIGHT_BYTES // num_bytes)
    return [(*shape, plain[shape]()) for _ in range(times) for shape in _SHAPES]


def _packed(kind: str, num_outputs: int, num_inputs: int) -> Callable[[], Tensor]:
    if kind == "floats":
        return partial(torch.ops.quire.pack_weight, torch.full((num_outputs, num_inputs), 0.02, dtype=torch.bfloat16))
    bits, group = (8, num_inputs) if kind == "codes_8" else (4, 32)
    codes = torch.full((num_outputs, num_inputs), 3, dtype=torch.uint8)
    scales = torch.full((num_outputs, num_inputs // group), 0.01)
    offsets = -8 * scales if bits == 4 else None
    return partial(torch.ops.quire.pack_quantized, codes, scales, offsets, bits, False)


def _attention(tokens: int) -> Callable[[], object]:
    """The last tokens of sequences of different lengths, whose blocks lie scattered."""
    lengths, block, heads, kv_heads, dim = (3072, 1536, 768, 256), 16, 16, 8, 128
    num_blocks = sum(lengths) // block
    caches = [torch.full((num_blocks, kv_heads, block, dim), 0.01, dtype=torch.bfloat16) for _ in range(2)]
    blocks = torch.arange(num_blocks, dtype=torch.int32) * 7919 % num_blocks
    tables = torch.zeros(len(lengths), max(lengths) // block, dtype=torch.int32)
    for row, part in enumerate(blocks.split([length // block for length in lengths])):
        tables[row, : part.numel()] = part
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * tokens
    query = torch.full((tokens * len(lengths), heads, dim), 0.01, dtype=torch.bfloat16)
    lens = torch.tensor(lengths, dtype=torch.int32)
    of_heads = (query, *caches, tables, lens, starts, torch.empty_like(query), None, None)
    return partial(torch.ops.quire.paged_attention, *of_heads, dim**-0.5, 0, False, 0.0)


def processor() -> str:
    """Its name and what it can do, as the system tells them of its first core."""
    x86 = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    names = (*x86, "CPU implementer", "CPU part", "Features")
    lines = []
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if not line.strip():
                break
            name, _, value = line.partition(":")
            if name.strip() in names:
                lines.append(f"{name.strip()}: {value.strip()}")
    return "\n".join(lines) or platform.processor() or platform.machine()


def file_of(kernels: Path, isa: str, num_threads: int) -> Path:
    """Of this processor, these kernels, this instruction set, and so many threads that share caches and memory."""
    digest = hashlib.sha256(f"{_VERSION} {processor()} {kernels.name} {isa} {num_threads}".encode()).hexdigest()
    return cache_folder() / f"tuning-{digest[:16]}.json"


def read(file: Path, knobs: Knobs) -> Findings:
    """What is in it, which is set; nothing, and all defaults, if it is not there or does not fit."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        findings = Findings.parse(text)
        findings.set_in(knobs)
    except FileNotFoundError:
        pass
    except (OSError, *_NO_FINDINGS) as error:
        _logger.warning("CPU kernels: %s is not what a measurement leaves, and is not used: %s", file, error)
    else:
        return findings
    set_defaults(knobs)
    return Findings()


def write(file: Path, findings: Findings, facts: Mapping[str, object]) -> None:
    """Whoever looks sees the whole file or none."""
    ratios = {name: choice.ratios for name, choice in findings.choices.items()}
    content = {
        **facts,
        "tries": findings.num_tries,
        "choices": {name: choice.value for name, choice in findings.choices.items()},
        "time_by_default_median_and_quartiles": ratios,
    }
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def apply(
    knobs: Knobs,
    file: Path,
    probes: Callable[[], Mapping[str, MakeProbe]],
    num_threads: int,
    is_again: bool = False,
) -> str:
    """Choices of earlier starts, or those of a measurement now; in words."""
    known = read(file, knobs)
    if is_again:
        known = Findings()
    left = {tunable.name for tunable in knobs.tunables()} - known.choices.keys()
    if not left or known.num_tries >= MOST_TRIES:
        return known.in_words(knobs)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("w") as lock:
            # another process measures: two at once would measure each other
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            to_measure = {name: make for name, make in probes().items() if name in left}
            return _measure(knobs, file, known, to_measure, num_threads).in_words(knobs)
    except BlockingIOError:
        reason = "another process measures now"
    except (OSError, RuntimeError, MemoryError) as error:  # no room in the folder, or for what is multiplied
        reason = one_line(error)
    return leave(knobs, known, reason)


def leave(knobs: Knobs, known: Findings, reason: str) -> str:
    """A start does not fail over what is only to make it faster; in words, as above."""
    known.set_in(knobs)
    _logger.warning("CPU kernels: not tuned to this processor at this start: %s", reason)
    return known.in_words(knobs)


def _measure(knobs: Knobs, file: Path, known: Findings, probes: Mapping[str, MakeProbe], num_threads: int) -> Findings:
    facts = {"threads": num_threads, "processor": processor().split("\n")}
    # It counts before: a start that is ended over it is one of MOST_TRIES. And where nothing can be kept nobody waits.
    write(file, replace(known, num_tries=known.num_tries + 1), facts)
    _logger.warning("CPU kernels: tuned to this processor now: %.0f seconds.", SECONDS)
    began = time.monotonic()
    known.set_in(knobs)
    with torch.inference_mode():
        findings = known.and_then(tune(knobs, probes, time.perf_counter, SECONDS))
    seconds = round(time.monotonic() - began, 2)
    try:
        write(file, findings, {**facts, "seconds": seconds})
    except OSError as error:
        _logger.warning("CPU kernels: what was measured serves this start alone: %s", one_line(error))
        return findings
    num_left = len(known.choices.keys() | probes.keys()) - len(findings.choices)
    goes_on = num_left > 0 and findings.num_tries < MOST_TRIES
    _logger.warning(
        "CPU kernels: tuned after %.1f s, %d of %d numbers measured%s. Later starts find the choices in %s; "
        "QUIRE_CPU_TUNING=again measures anew.",
        seconds,
        len(findings.choices),
        len(findings.choices) + num_left,
        ", the rest at the next start" if goes_on else "",
        file,
    )
    return findings
