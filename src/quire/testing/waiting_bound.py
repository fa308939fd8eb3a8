"""How long a request may wait for its first token under two-level scheduling: docs/policies.md derives it.

Holds while rows and blocks are free and nobody is preempted; what it costs to wait for them is in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable


def steps_to_first_token(
    prompt: int,
    ahead: Iterable[int],
    *,
    budget: int,
    num_rows: int,
    longest_after: int,
    staging_size: int = 8,
    progress_share: float = 0.1,
) -> int:
    """Greatest number of steps from arrival to the first token.

    `prompt` tokens are its own. `ahead` has the prompts of the requests that came before it and had no first token when
    it came. Those that come after it matter in one way only: staging_size - 1 of them may join its batch, each with at
    most `longest_after` tokens.
    """
    before = list(ahead)
    # Its first chunk: until it starts, every step that does not start all of staging spends the whole budget, and only
    # on decoding (at most a token a row) and on prompts that are counted here.
    counted = sum(before) + (staging_size - 1) * longest_after + prompt
    num_refills = -(-(len(before) + 1) // staging_size)
    to_start = -(-counted // (budget - num_rows)) + num_refills + 1
    # From there the share is its own as soon as those before it have their first tokens.
    share = max(1, int(progress_share * budget))
    return to_start + sum(-(-length // share) for length in [*before, prompt])
