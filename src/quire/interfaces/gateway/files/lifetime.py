"""How long a file is kept, as OpenAI's `expires_after` says it."""

from __future__ import annotations

from quire.interfaces.server.wire.errors import invalid

_LEAST_SECONDS = 3_600
_MOST_SECONDS = 2_592_000


def checked_lifetime(anchor: str | None, seconds: int, name: str) -> int:
    """Seconds from the creation on. `name` is the field's."""
    if anchor != "created_at":
        raise invalid(f"{name}.anchor: must be created_at.", name)
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        text = f"{name}.seconds={seconds}: must be between {_LEAST_SECONDS} (an hour) and {_MOST_SECONDS} (30 days)."
        raise invalid(text, name)
    return seconds
