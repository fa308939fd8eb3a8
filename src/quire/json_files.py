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
        size = file.stat().st_size
        if size > _MOST_BYTES:
            raise ModelError(f"{file}: has {size:,} bytes, at most {_MOST_BYTES:,} are read. {advice}")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ModelError(f"{file}: cannot be read as JSON ({one_line(error)}). {advice}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: must hold a JSON object, not {type(content).__name__}. {advice}")
    return content
