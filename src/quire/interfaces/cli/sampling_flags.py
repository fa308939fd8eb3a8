"""Command-line flags of sampling. Names, meanings and bounds are those of SamplingParams, which also checks them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from quire.errors import OptionError
from quire.sampling_params import SamplingParams

# flag -> (field, kind, help)
NumberFlags = Mapping[str, tuple[str, type, str]]
SAMPLING_FLAGS: NumberFlags = {
    "--max-tokens": ("max_tokens", int, "longest answer, in tokens"),
    "--min-tokens": ("min_tokens", int, "no end before so many tokens"),
    "--temperature": ("temperature", float, "0 always takes the most probable token"),
    "--top-p": ("top_p", float, "sample among the most probable tokens that sum up to this"),
    "--top-k": ("top_k", int, "sample among so many most probable tokens; 0 means all"),
    "--min-p": ("min_p", float, "least probability of a token, as a share of the best one's"),
    "--repetition-penalty": ("repetition_penalty", float, "above 1 discourages what was there before"),
    "--presence-penalty": ("presence_penalty", float, "discourages tokens that were generated before"),
    "--frequency-penalty": ("frequency_penalty", float, "the same, in proportion to how often"),
    "--seed": ("seed", int, "same seed and parameters, same text"),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Only flags that were typed appear in the result."""
    group = parser.add_argument_group("sampling")
    add_numbers(group, "sampling_", SAMPLING_FLAGS)
    group.add_argument(
        "--stop", dest="sampling_stop", action="append", default=argparse.SUPPRESS, metavar="TEXT",
        help="end before this text; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", dest="sampling_ignore_eos", action="store_true", default=argparse.SUPPRESS,
        help="do not end at the model's end-of-text token",
    )  # fmt: skip


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of SamplingParams that were typed."""
    typed = typed_fields(arguments, "sampling_", SAMPLING_FLAGS)
    # what is out of bounds is said before a model loads
    SamplingParams(**typed)
    return typed


def add_numbers(group: Any, prefix: str, flags: NumberFlags) -> None:
    """Fields are kept under this prefix, beside what else was typed."""
    for flag, (field, kind, text) in flags.items():
        metavar = "N" if kind is int else "X"
        group.add_argument(flag, dest=prefix + field, default=argparse.SUPPRESS, metavar=metavar, help=text)


def typed_fields(arguments: argparse.Namespace, prefix: str, flags: NumberFlags) -> dict[str, Any]:
    """What was typed of the fields with this prefix, numbers as such."""
    typed = {name.removeprefix(prefix): value for name, value in vars(arguments).items() if name.startswith(prefix)}
    for flag, (field, kind, _) in flags.items():
        if field in typed:
            typed[field] = number_of(flag, kind, typed[field])
    return typed


def number_of(flag: str, kind: type, text: str) -> int | float:
    """A number that was typed."""
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        raise OptionError(f"{flag} {text}: must be a {'whole ' * (kind is int)}number.") from None
