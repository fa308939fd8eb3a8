"""The tokens around what a model thinks: what a budget of thoughts is counted by."""

from __future__ import annotations

import msgspec


class ThoughtMarks(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One token before a thought, one behind it."""

    opening: int
    closing: int
    # answers begin inside a thought, whether the prompt shows it or not
    is_always_open: bool = False
