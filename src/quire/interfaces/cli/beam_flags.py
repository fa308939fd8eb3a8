"""Command-line flags of beam search. Names, meanings and bounds are BeamSearchParams's, which also checks them."""

from __future__ import annotations

import argparse
from typing import Any

from quire.beam_search_params import BeamSearchParams
from quire.errors import OptionError, RequestError
from quire.interfaces.cli.sampling_flags import NumberFlags, add_numbers, typed_fields

_FLAGS: NumberFlags = {
    "--beam-width": ("beam_width", int, "follow so many most probable continuations instead of sampling one"),
    "--length-penalty": ("length_penalty", float, "order them by log-probability / length ** X (default: 1)"),
}
_EARLY_STOPPING: dict[str, Any] = {"true": True, "false": False, "never": "never"}
# Flags of sampling that beams know too, by their fields.
_SHARED = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "ignore_eos": "ignore_eos",
    "n": "num_return_sequences",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
}


def add_beam_flags(parser: argparse.ArgumentParser) -> None:
    """Only flags that were typed appear in the result."""
    group = parser.add_argument_group("beam search")
    add_numbers(group, "beams_", _FLAGS)
    group.add_argument(
        "--early-stopping", dest="beams_early_stopping", choices=_EARLY_STOPPING, default=argparse.SUPPRESS,
        help="end the search when as many are complete as beams are followed (default: false)",
    )  # fmt: skip
    group.add_argument(
        "--do-sample", dest="beams_do_sample", action="store_true", default=argparse.SUPPRESS,
        help="draw their continuations, by --seed and --temperature",
    )  # fmt: skip


def beams_of(arguments: argparse.Namespace, sampling: dict[str, Any], **defaults: Any) -> BeamSearchParams | None:
    """None if nothing of the kind was typed. `sampling`: the flags of sampling that were typed."""
    typed = typed_fields(arguments, "beams_", _FLAGS)
    if not typed:
        return None
    if "beam_width" not in typed:
        flag = "--" + next(iter(typed)).replace("_", "-")
        raise OptionError(f"{flag}: only with --beam-width N, which asks for beam search. Give both, or leave it out.")
    if "early_stopping" in typed:
        typed["early_stopping"] = _EARLY_STOPPING[typed["early_stopping"]]
    for field, value in sampling.items():
        if field not in _SHARED:
            flag = "--" + field.replace("_", "-")
            raise OptionError(
                f"{flag}: not with --beam-width: no token is forbidden to beams. Leave one of the two out."
            )
        typed[_SHARED[field]] = value
    try:
        return BeamSearchParams(**{**defaults, **typed})
    except RequestError as error:
        if error.param != "num_return_sequences":
            raise
        # the flag has another name than the field
        said = str(error).replace("num_return_sequences=", "-n ").replace("beam_width", "--beam-width")
        raise OptionError(said.replace("--beam-width=", "--beam-width ")) from None
