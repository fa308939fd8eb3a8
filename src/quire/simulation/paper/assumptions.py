"""What the paper does not say and a simulation must know: listed once, the same for all figures.

Fixed from Table 3.1, figures 3.2 and 3.11 and what others published of steps in 2023 (`quire repro assumptions` shows
how); no other figure had a say. `--assume name=value` shows what a figure would be under another one, `quire repro
sensitivity` which orderings hold over the ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from quire.errors import OptionError


@dataclass(frozen=True)
class Assumptions:
    """Each with where it comes from."""

    # Table 3.1: with this share of the devices' memory all three rows come out within 1.5 %
    memory_share: float = 0.94
    # Figure 3.2: tokens that 7 requests of Orca (Max) hold, at the means of figure 3.11. Standard deviation over mean
    # of a gamma distribution, of prompts and of outputs, of all datasets
    variation: float = 0.87
    # of launches that the device waits for: with it a step of one sequence takes the 24.8 ms that were published
    seconds_per_layer: float = 80e-6
    # Figure 3.2: the least with which vLLM's memory is full at 2 requests a second. What Python does for each sequence
    # in each step: scheduling, input, sampling, text
    seconds_per_sequence: float = 0.37e-3
    # of the data sheet, what kernels reach: the cost model's own
    compute_share: float = 0.65
    bandwidth_share: float = 0.8
    # WMT16 English to German: tokens of a sentence and of its translation
    sentence: float = 30.0
    translation: float = 40.0
    # rounds before the last one in a conversation of the chat, as if all numbers were equally likely
    most_rounds: int = 8

    # of beams: how much likelier a candidate is than the next one, in units of 0.3 to 1.3 of log-probability
    confidence: float = 1.0
    # between device and host: of one copy of a block's keys or values in one layer, before its first byte
    seconds_per_copy: float = 10e-6

    def under(self, changes: Mapping[str, float]) -> Assumptions:
        """With other values of some."""
        return replace(self, **{name: type(getattr(self, name))(value) for name, value in changes.items()})

    def assume(self, texts: list[str]) -> Assumptions:
        """`name=value` each."""
        known = {field.name: field for field in fields(self)}
        changes = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in known:
                raise OptionError(f"assume={text[:60]}: must be one of {', '.join(known)}, as in variation=1.0.")
            try:
                number = type(getattr(self, name))(float(value))
            except (ValueError, OverflowError):
                raise OptionError(f"assume={text[:60]}: the value must be a number.") from None
            if not 0 < number < 1e6:
                raise OptionError(f"assume={text[:60]}: the value must be above 0.")
            changes[name] = number
        return self.under(changes)


@dataclass(frozen=True)
class Range:
    """Between what an assumption may lie, and the figures on which it bears; none named: on all."""

    low: float
    high: float
    figures: tuple[str, ...] = ()


# each as far as what it is derived from allows
RANGES = {
    # Table 3.1: some row is out by 9 % at the ends
    "memory_share": Range(0.93, 0.95),
    # Figure 3.2: twice the error of the best
    "variation": Range(0.7, 1.0),
    # all launches hidden behind the device's work; none of some 12 a layer
    "seconds_per_layer": Range(20e-6, 200e-6),
    # the sampler alone, as it was measured; as much again as memory needs to be full
    "seconds_per_sequence": Range(0.19e-3, 0.5e-3),
    "compute_share": Range(0.45, 0.8),
    "bandwidth_share": Range(0.65, 0.9),
    "sentence": Range(15, 60, ("fig3.16",)),
    "translation": Range(20, 80, ("fig3.16",)),
    "most_rounds": Range(3, 16, ("fig3.17",)),
    "confidence": Range(0.1, 4.0, ("fig3.14", "fig3.15")),
    "seconds_per_copy": Range(5e-6, 20e-6, ("fig3.19",)),
}
