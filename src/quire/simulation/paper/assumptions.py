"""What the paper does not say and a simulation must know: listed once, the same for all figures.

Fixed from Table 3.1 and figures 3.2 and 3.11 alone, before any other figure ran. `quire repro --assume name=value`
shows what a figure would be under another one.
"""

from __future__ import annotations

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
    # of PyTorch in 2023 without recorded graphs: some 12 kernels a layer, 8 microseconds each to launch
    seconds_per_layer: float = 100e-6
    # Figure 3.2: at 2 requests a second vLLM's memory is full, so this is about its capacity. What Python does for each
    # sequence in each step: scheduling, input, sampling, text
    seconds_per_sequence: float = 0.33e-3
    # WMT16 English to German: tokens of a sentence and of its translation
    sentence: float = 30.0
    translation: float = 40.0
    # rounds before the last one in a conversation of the chat, as if all numbers were equally likely
    most_rounds: int = 8

    # of beams: how much likelier a candidate is than the next one, in units of 0.3 to 1.3 of log-probability
    confidence: float = 1.0
    # between device and host: of one copy of a block's keys or values in one layer, before its first byte
    seconds_per_copy: float = 10e-6

    def assume(self, texts: list[str]) -> Assumptions:
        """`name=value` each."""
        known = {field.name: field for field in fields(self)}
        changed = self
        for text in texts:
            name, _, value = text.partition("=")
            if name not in known:
                raise OptionError(f"assume={text[:60]}: must be one of {', '.join(known)}, as in variation=1.0.")
            try:
                number = type(getattr(self, name))(float(value))
            except ValueError:
                raise OptionError(f"assume={text[:60]}: the value must be a number.") from None
            if not 0 < number < 1e6:
                raise OptionError(f"assume={text[:60]}: the value must be above 0.")
            changed = replace(changed, **{name: number})
        return changed
