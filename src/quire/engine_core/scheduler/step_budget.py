"""How many tokens a step may have: a number, and fewer while somebody waits for the next token of an answer.

With a target of time between tokens, a step that has such rows takes no longer than the target, by the prices that were
measured when the engine started: long prompts are cut so that nobody who streams waits for them. A step is decided by
these prices alone, never by a clock, so that what was recorded can be decided again.

    a token with which a prompt begins    1
    a token behind c others               1 + growth x (the tokens among them that it sees, on average over the layers)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.messages import IntArray, LayerSpec

# What a server takes unless it is told: in a simulation of prompts of 161 tokens on two cores, at 0.8 of capacity, the
# first token of half of the requests came 1.14 x later than without a target, and the longest wait between tokens went
# from 1,836 to 149 ms (docs/benchmarks.md).
_STEPS_OF_ONE_TOKEN = 4
_STRETCH = 2.0
# a layer without a window sees as many
_ALL = 1 << 40
# no token is so much dearer for one that it sees: the record of earlier starts may say anything
_MOST_GROWTH = 1e6
# where a report says what a token costs
_FAR = 8192


@dataclass(frozen=True)
class StepBudget:
    """`seconds`: the target; 0: there is none. `seconds_per_step` is the price of a step of one token. Prompts get on
    by what `least` tokens cost with which a prompt begins, and by a token, also where steps of those who stream are
    longer than the target by themselves, and by so much that a step is `stretch` times as long as it is without them.
    """

    max_num_tokens: int
    seconds: float = 0.0
    seconds_per_step: float = 0.0
    seconds_per_token: float = 0.0
    stretch: float = 1.0
    least: int = 16
    # by how much a token is dearer for each token before it that it sees, as a share of one that sees none
    growth: float = 0.0
    # (share of the layers, tokens that they see at most)
    windows: tuple[tuple[float, int], ...] = ((1.0, _ALL),)

    @classmethod
    def by_prices(
        cls,
        max_num_tokens: int,
        seconds: float | None,
        seconds_per_step: float,
        seconds_per_token: float,
        seconds_per_pair: float = 0.0,
        layers: Sequence[LayerSpec] = (),
    ) -> StepBudget:
        """`seconds`: None chooses a target by the length of steps."""
        stretch = 1.0
        if seconds is None:
            seconds = _STEPS_OF_ONE_TOKEN * seconds_per_step
            stretch = _STRETCH
        growth = min(_MOST_GROWTH, seconds_per_pair / seconds_per_token) if seconds_per_token else 0.0
        counts = Counter(layer.sliding_window or _ALL for layer in layers if not layer.state_bytes)
        windows = tuple((count / counts.total(), window) for window, count in counts.items())
        return cls(
            max_num_tokens,
            seconds,
            seconds_per_step,
            seconds_per_token,
            stretch,
            growth=growth,
            windows=windows,
        )

    def report(self) -> list[str]:
        if not self.seconds:
            return []
        cut = f"while answers are under way, prompts are cut so that a step takes about {self.seconds * 1e3:.0f} ms"
        if self.growth:
            cut += f"; a token behind {_FAR:,} others counts {self.weights(np.array([_FAR]))[0]:.1f} times"
        return [cut]

    def tokens(self, num_streaming: int) -> int:
        """Of all rows together, if the next tokens of answers are so many of them; of prompts, those with which they
        begin."""
        if not self.seconds or not self.seconds_per_token or not num_streaming:
            return self.max_num_tokens
        seconds_without = self.seconds_per_step + (num_streaming - 1) * self.seconds_per_token
        seconds = max(self.seconds, self.stretch * seconds_without)
        # bounded before it is a whole number: a price next to nothing affords more than there are numbers
        affordable = 1 + int(min(self.max_num_tokens, (seconds - self.seconds_per_step) / self.seconds_per_token))
        return min(self.max_num_tokens, max(affordable, num_streaming + self.least))

    def weights(self, num_before: IntArray) -> npt.NDArray[np.float64]:
        """Each for how many of the budget a token counts that has so many before it."""
        weights = np.ones(len(num_before))
        if self.growth:
            for share, window in self.windows:
                weights += self.growth * share * np.minimum(num_before, window)
        return weights
