"""Reading the JSON files that come with a model: an object, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import ModelError, one_line

# The largest that models have, vocabularies, are some 35 MB. Decoded, a file takes up to 20 times its size.
_MOST_BYTES = 1 << 28


def read_object(file: Path, *, advice: str = "Download it again.") -> dict[str, Any]:
    """Raises ModelError for what cannot be read, is no JSON, or no object."""
    try:
        text = read_bytes(file, advice=advice).decode()
    except ValueError as error:
        raise _unreadable(str(file), error, advice) from error
    return parse_object(text, str(file), advice=advice)


def read_bytes(file: Path, *, advice: str = "Download it again.") -> bytes:
    """Raises ModelError for what cannot be read, or is too large."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise _unreadable(str(file), error, advice) from error
    if size > _MOST_BYTES:
        raise ModelError(f"{file}: has {size:,} bytes, at most {_MOST_BYTES:,} are read. {advice}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(str(file), error, advice) from error


def parse_object(text: str, where: str, *, advice: str = "Download it again.") -> dict[str, Any]:
    """The same of a text that was read already."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise _unreadable(where, error, advice) from error
    if not isinstance(content, dict):
        raise ModelError(f"{where}: must hold a JSON object, not {type(content).__name__}. {advice}")
    return content


def _unreadable(where: str, error: Exception, advice: str) -> ModelError:
    return ModelError(f"{where}: cannot be read as JSON ({one_line(error)}). {advice}")
