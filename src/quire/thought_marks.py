"""The tokens around what a model thinks: what a budget of thoughts is counted by."""

from __future__ import annotations

import msgspec

from quire.errors import RequestError


class ThoughtMarks(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One token before a thought, one behind it."""

    opening: int
    closing: int
    # answers begin inside a thought, whether the prompt shows it or not
    is_always_open: bool = False


def no_marks() -> ThoughtMarks:
    """Where nobody has told which they are."""
    raise RequestError(
        "thinking_token_budget: nobody knows here which tokens stand around a thought. Leave it out, or give "
        "thought_marks to the RequestMaker.",
        param="thinking_token_budget",
    )
