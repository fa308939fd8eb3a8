"""Strings that end a text."""

from __future__ import annotations

from .case import Case, chat, completion, each

CASES: list[Case] = [
    *each(completion, "stop", [[""], ["a", ""], [1], [None], [["a"]], {}, True, 1, 1.5]),
    *each(chat, "stop", [[""], [1], [{}], {"a": 1}, False, 0]),
    completion("17 strings", stop=[f"s{number}" for number in range(17)]),
    chat("100,000 strings", stop=["s"] * 100_000),
    completion("a string of 1,025 letters", stop="x" * 1025),
    chat("a string of 10,000 letters", stop=["x" * 10_000]),
    chat("a string of 1,025 wide letters", stop=["\U0001f600" * 1025]),
]
