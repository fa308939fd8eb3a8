"""Token ids from clients."""

from __future__ import annotations

from quire.interfaces.server.wire.errors import invalid


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises ApiError for an id outside the vocabulary."""
    # twice as fast as to look at one after the other, and there may be a million
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            text = f"{param}: token id {str(token_id)[:40]} is not in the vocabulary (0 to {vocab_size - 1})."
            raise invalid(text, param)
