"""Names of tokens that the core keeps. Prefixes and sessions share one space of handles; a word before tells them."""

from __future__ import annotations

import re
from collections.abc import Collection

from quire.errors import RequestError

PINNED = "pin:"
KEPT = "kept:"

# What can stand in a URL and in a line of a log as it is.
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# In a URL these are folders, and clients resolve them before they send it.
_PATHS = (".", "..")


def checked_name(name: object, what: str) -> str:
    """The name itself, if it can be one."""
    if isinstance(name, str) and _NAME.fullmatch(name) and name not in _PATHS:
        return name
    shown = repr(name)
    raise RequestError(
        f"name={shown if len(shown) <= 80 else shown[:77] + '...'}: the name of a {what} has 1 to 64 letters, digits "
        'or any of . _ : - and is not "." or "..", because it stands in addresses and logs. Choose another, or leave '
        "it out to get one.",
        param="name",
    )


def free_name(stem: str, taken: Collection[str]) -> str:
    """STEM-1, STEM-2, ...: the first that is not taken."""
    number = 1
    while f"{stem}-{number}" in taken:
        number += 1
    return f"{stem}-{number}"
