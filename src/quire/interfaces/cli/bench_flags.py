"""Flags that the workloads of `quire bench` have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ContextLengthError, OptionError
from quire.interfaces.cli.bench_limits import MachineLimits, measure_limits
from quire.interfaces.cli.bench_numbers import Result


@dataclass(frozen=True)
class Size:
    """One number of a workload."""

    flag: str
    default: int
    least: int
    text: str

    @property
    def field(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def add_sizes(group: Any, sizes: Sequence[Size]) -> None:
    for size in sizes:
        text = f"{size.text} (default: {size.default})"
        group.add_argument(size.flag, default=str(size.default), metavar="N", dest=size.field, help=text)


def sizes_of(arguments: argparse.Namespace, sizes: Sequence[Size]) -> dict[str, int]:
    return {size.field: whole_number(size.flag, getattr(arguments, size.field), size.least) for size in sizes}


def too_long(sizes: Sequence[Size], error: ContextLengthError) -> OptionError:
    """Where a model refuses a prompt that nobody typed: the flags that say how long it is."""
    flags = [size.flag for size in sizes if "tokens" in size.text]
    return OptionError(f"{', '.join(flags)}: too long for this model. Lower them, or take another model. {error}")


def add_measure_flags(parser: argparse.ArgumentParser, rounds: int) -> None:
    group = parser.add_argument_group("measuring")
    group.add_argument("--rounds", default=str(rounds), metavar="N", help=f"how often (default: {rounds})")
    group.add_argument("--seed", default="0", metavar="N", help="seed of prompts and sampling (default: 0)")
    add_limit_flags(group)
    add_json_flag(group)


def add_limit_flags(group: Any) -> None:
    group.add_argument(
        "--bandwidth", metavar="GB/S", help="read bandwidth of the memory; measured on the spot if left out"
    )
    group.add_argument(
        "--peak", metavar="GOP/S", help="rate of arithmetic in the precision used; measured on the spot if left out"
    )


def add_json_flag(group: Any) -> None:
    group.add_argument("--json", metavar="FILE", help="write the numbers there as well; - prints them and no table")


def limits_of(arguments: argparse.Namespace, threads: int | None) -> MachineLimits:
    """What was typed, and the rest measured."""
    bandwidth = _rate("--bandwidth", arguments.bandwidth)
    peak = _rate("--peak", arguments.peak)
    measured = MachineLimits(threads or 0, 0.0, {}) if bandwidth and peak else measure_limits(threads)
    peaks = dict.fromkeys(("float32", "bfloat16", "int8"), peak) if peak else measured.peaks
    return MachineLimits(measured.threads, bandwidth or measured.bandwidth, peaks)


def finish(result: Result, arguments: argparse.Namespace) -> int:
    """Prints the table, or writes the file, or both."""
    if arguments.json == "-":
        print(json.dumps(result.as_dict()))
        return 0
    print(result.as_table())
    if arguments.json:
        result.write(arguments.json)
    return 0


# of a number that somebody types; Python refuses to read thousands
_MOST_DIGITS = 18
# of a number above 0: a rate below it is less than one request in thirty years
_LEAST = 1e-9


def whole_number(flag: str, text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < least:
        raise OptionError(f"{flag} {text[:60]}: must be a whole number, {least} or more.")
    return int(text)


def number(flag: str, text: str) -> float:
    """Above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not _LEAST < value < 1e9:
        raise OptionError(f"{flag} {text[:60]}: must be a number above 0.")
    return value


def numbers(flag: str, text: str) -> list[float]:
    return [number(flag, part) for part in text.split(",")]


def _rate(flag: str, text: str | None) -> float:
    return number(flag, text) * 1e9 if text is not None else 0.0
