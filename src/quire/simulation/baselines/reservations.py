"""How much contiguous memory a request is given when it starts: Orca's three variants (3.6.1)."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine_core.request import Request
from quire.simulation.baselines.buddy_space import power_of_two

# tokens for which a sequence of this request gets room; in a simulation max_tokens is the length that it will have
Reservation = Callable[[Request], int]


def oracle(request: Request) -> int:
    """As if its length were known."""
    return request.max_total


def power_of_two_output(max_model_len: int) -> Reservation:
    """At most twice what the output will have, 32 positions for 25, and no more than the model allows."""

    def num_tokens(request: Request) -> int:
        num_output = power_of_two(request.max_total - request.num_prompt_tokens)
        return min(max_model_len, request.num_prompt_tokens + num_output)

    return num_tokens


def longest(max_model_len: int) -> Reservation:
    """The longest sequence that the model allows, for everybody."""
    return lambda request: max_model_len
