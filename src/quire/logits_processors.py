"""Logits processors of one's own: functions that change the logits of a row before its next token is chosen.

    def no_repeats(token_ids, logits):
        logits[token_ids[-1:]] = float("-inf")

    SamplingParams(logits_processors=[no_repeats])             # where the engine core runs in this process
    SamplingParams(logits_processors=["no_repeats"])           # an entry point of the group quire.logits_processors:
    SamplingParams(logits_processors=[{"name": "no_repeats", "args": {"window": 4}}])     # a function that makes one

A processor gets the output so far and the row's float32 logits. It changes these in place, or returns others.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from quire.errors import RequestError, suggestion

GROUP = "quire.logits_processors"
_MOST = 16
# of what a request sends along: characters, and entries of lists and objects
_MOST_ARGS = 16 * 1024
_MOST_NAME = 100


@cache
def installed() -> dict[str, EntryPoint]:
    """Those that packages bring, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def name_and_args(asked: Any) -> tuple[str, dict[str, Any]]:
    """Of one that is asked for by name."""
    return (asked, {}) if isinstance(asked, str) else (asked["name"], asked.get("args") or {})


def check_processors(asked: Any) -> None:
    """Raises RequestError for what none can be."""
    if not isinstance(asked, list) or len(asked) > _MOST:
        raise RequestError(
            f"logits_processors: must be a list of at most {_MOST} functions or names.", param="logits_processors"
        )
    for one in asked:
        is_named = isinstance(one, str) or (
            isinstance(one, dict)
            and isinstance(one.get("name"), str)
            and isinstance(one.get("args") or {}, dict)
            and one.keys() <= {"name", "args"}
        )
        if not (is_named or callable(one)):
            raise RequestError(
                f"logits_processors: {shown(one)} must be a function, a name, or an object of name and args.",
                param="logits_processors",
            )
        if is_named:
            _check_sizes(*name_and_args(one))


def shown(value: Any) -> str:
    """As far as a message has room for it."""
    text = repr(value)
    return text if len(text) <= _MOST_NAME else f"{text[:_MOST_NAME]}..."


def _check_sizes(name: str, args: dict[str, Any]) -> None:
    if len(name) > _MOST_NAME:
        raise RequestError(
            f"logits_processors: a name of {len(name)} characters, at most {_MOST_NAME} are allowed.",
            param="logits_processors",
        )
    size = 0
    left: list[Any] = [args]
    while left and size <= _MOST_ARGS:
        value = left.pop()
        size += 1
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, str | bytes):
            size += len(value)
    if size > _MOST_ARGS:
        raise RequestError(
            f"logits_processors={name}: its args have more than {_MOST_ARGS} characters and entries. Send less.",
            param="logits_processors",
        )


def check_known(asked: list[Any], *, takes_functions: bool) -> None:
    """The same for what this engine does not have."""
    for one in asked:
        if callable(one):
            if not takes_functions:
                raise RequestError(
                    f"logits_processors={getattr(one, '__name__', one)}: a function cannot go to an engine core in "
                    f"another process. Install it as an entry point of the group {GROUP} and give its name, or use LLM "
                    "with one worker.",
                    param="logits_processors",
                )
            continue
        name, _ = name_and_args(one)
        if name not in installed():
            known = ", ".join(sorted(installed())) or "none is installed"
            raise RequestError(
                f"logits_processors={name}: must be an entry point of the group {GROUP} ({known})."
                + suggestion(name, installed()),
                param="logits_processors",
            )
