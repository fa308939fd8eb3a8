"""How many tokens a step may have: a number, and fewer while somebody waits for the next token of an answer.

With a target of time between tokens, a step that has such rows takes no longer than the target, by the prices that were
measured when the engine started: long prompts are cut so that nobody who streams waits for them. A step is decided by
these prices alone, never by a clock, so that what was recorded can be decided again.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a server takes unless it is told: in a simulation of prompts of 161 tokens on two cores, at 0.8 of capacity, the
# first token of half of the requests came 1.14 x later than without a target, and the longest wait between tokens went
# from 1,836 to 149 ms (docs/benchmarks.md).
_STEPS_OF_ONE_TOKEN = 4
_STRETCH = 2.0


@dataclass(frozen=True)
class StepBudget:
    """`seconds`: the target; 0: there is none. `seconds_per_step` is the price of a step of one token. Prompts get on
    by `least` tokens also where steps of those who stream are longer than the target by themselves, and by so many
    that a step is `stretch` times as long as it is without them."""

    max_num_tokens: int
    seconds: float = 0.0
    seconds_per_step: float = 0.0
    seconds_per_token: float = 0.0
    stretch: float = 1.0
    least: int = 16

    @classmethod
    def by_prices(
        cls, max_num_tokens: int, seconds: float | None, seconds_per_step: float, seconds_per_token: float
    ) -> StepBudget:
        """`seconds`: None chooses a target by the length of steps."""
        stretch = 1.0
        if seconds is None:
            seconds = _STEPS_OF_ONE_TOKEN * seconds_per_step
            stretch = _STRETCH
        return cls(max_num_tokens, seconds, seconds_per_step, seconds_per_token, stretch)

    def report(self) -> list[str]:
        if not self.seconds:
            return []
        return [f"while answers are under way, prompts are cut so that a step takes about {self.seconds * 1e3:.0f} ms"]

    def tokens(self, num_streaming: int) -> int:
        """Of all rows together, if the next tokens of answers are so many of them."""
        if not self.seconds or not self.seconds_per_token or not num_streaming:
            return self.max_num_tokens
        seconds_without = self.seconds_per_step + (num_streaming - 1) * self.seconds_per_token
        seconds = max(self.seconds, self.stretch * seconds_without)
        # bounded before it is a whole number: a price next to nothing affords more than there are numbers
        affordable = 1 + int(min(self.max_num_tokens, (seconds - self.seconds_per_step) / self.seconds_per_token))
        return min(self.max_num_tokens, max(affordable, num_streaming + self.least))
